// Element-wise kernels of stochastic rounding for hosts. native.py compiles and calls them.
//
// They give the bits of the functions in adam.py, updates.py and masters.py: the compiler must not merge a product and
// a sum (-ffp-contract=off). GCC vectorises the loops, in which reading the bits of a float costs nothing.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t CHUNK = 1 << 14;  // elements that a thread works on at a time

using BFloat16 = uint16_t;  // its bits

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widened(BFloat16 upper) {
    const uint32_t bits = uint32_t(upper) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float load(const BFloat16* from, int64_t at) { return widened(from[at]); }

inline float load(const float* from, int64_t at) { return from[at]; }

// Of one tensor: the words of nxdt_core.nn.random.rounding.rounding_key.
struct Key {
    uint32_t increment, first, second, unused;
};

// nxdt_core.nn.random.rounding.noise
inline uint32_t noise(uint32_t number, Key key) {
    uint32_t bits = number * key.increment + key.first;
    bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
    bits = ((bits ^ (bits >> 15)) + key.second) * 0x846CA68Bu;
    return bits >> 16;
}

// nxdt_core.nn.random.rounding.rounded
inline BFloat16 rounded(float value, uint32_t number, Key key) {
    const uint32_t unless_nan = -uint32_t(value == value);  // a NaN of all ones would overflow into a zero
    return BFloat16((bits_of(value) + (noise(number, key) & unless_nan)) >> 16);
}

inline void store(BFloat16* to, int64_t at, float value, uint32_t number, Key key) {
    to[at] = rounded(value, number, key);
}

inline void store(float* to, int64_t at, float value, uint32_t, Key) { to[at] = value; }

// Elements of a block whose numbers in the whole parameter are `first + element + (element / columns) * gap`, modulo
// 2^32; `columns` of 0 means that there is no gap. See nxdt_core.nn.random.positions.Rows.
struct Block {
    int64_t threads, elements, columns;
    uint32_t first, gap;
};

// Call `run(begin, end, offset)` for consecutive elements, whose numbers are `offset + element`.
template <class Run>
void for_rows(const Block& block, const Run& run) {
    const int64_t chunks = (block.elements + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(block.threads < chunks ? block.threads : chunks) schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t end = chunk + 1 < chunks ? (chunk + 1) * CHUNK : block.elements;
        for (int64_t begin = chunk * CHUNK; begin < end;) {
            const int64_t row = block.columns ? begin / block.columns : 0;
            const int64_t next = block.columns ? (row + 1) * block.columns : end;
            run(begin, next < end ? next : end, block.first + uint32_t(row) * block.gap);
            begin = next;
        }
    }
}

// nxdt_core.parallel.rounding.adam; one key, or three where the state is rounded too
template <bool decoupled, class State>
void adam(const Block& block, BFloat16* weight, const BFloat16* gradient, State* mean, State* square,
          const Key* keys, const float* factors, const float* rejected) {
    if (rejected && *rejected != 0) return;
    for_rows(block, [=](int64_t begin, int64_t end, uint32_t offset) {
        const bool narrow = sizeof(State) == sizeof(BFloat16);
        const Key of_weight = keys[0], of_mean = keys[narrow ? 1 : 0], of_square = keys[narrow ? 2 : 0];
        const float slow = factors[0], keep = factors[1], add = factors[2], decay = factors[3], shrink = factors[4];
        const float root = factors[5], eps = factors[6], rate = factors[7], scale = factors[8];
#pragma GCC ivdep
        for (int64_t at = begin; at < end; ++at) {
            const float value = load(weight, at), old_mean = load(mean, at);
            float grad = load(gradient, at) * scale;
            if (!decoupled) grad = grad + value * decay;
            const float decayed = decoupled ? value * shrink : value;
            const float new_mean = old_mean + (grad - old_mean) * slow;
            const float new_square = load(square, at) * keep + grad * grad * add;
            const float written = decayed - new_mean / (std::sqrt(new_square) * root + eps) * rate;
            const uint32_t number = offset + uint32_t(at);
            store(weight, at, written, number, of_weight);
            store(mean, at, new_mean, number, of_mean);
            store(square, at, new_square, number, of_square);
        }
    });
}

}  // namespace

#define ADAM(NAME, DECOUPLED, STATE)                                                                     \
    extern "C" void NAME(const Block* block, BFloat16* weight, const BFloat16* gradient, STATE* mean,    \
                         STATE* square, const Key* keys, const float* factors, const float* rejected) {  \
        adam<DECOUPLED>(*block, weight, gradient, mean, square, keys, factors, rejected);                \
    }

ADAM(decoupled_bfloat16_bfloat16_float32_float32, true, float)
ADAM(decoupled_bfloat16_bfloat16_bfloat16_bfloat16, true, BFloat16)
ADAM(coupled_bfloat16_bfloat16_float32_float32, false, float)
ADAM(coupled_bfloat16_bfloat16_bfloat16_bfloat16, false, BFloat16)

// nxdt_core.parallel.rounding.updates.round_into
extern "C" void round_into_bfloat16_float32(const Block* block, BFloat16* target, const float* values,
                                            const Key* key_of_tensor) {
    for_rows(*block, [=](int64_t begin, int64_t end, uint32_t offset) {
        const Key key = *key_of_tensor;
#pragma GCC ivdep
        for (int64_t at = begin; at < end; ++at) target[at] = rounded(values[at], offset + uint32_t(at), key);
    });
}

// nxdt_core.parallel.rounding.masters
extern "C" void keep_and_round_float32_float32(const Block* block, float* shard, float* kept,
                                               const Key* key_of_tensor) {
    for_rows(*block, [=](int64_t begin, int64_t end, uint32_t offset) {
        const Key key = *key_of_tensor;
#pragma GCC ivdep
        for (int64_t at = begin; at < end; ++at) {
            const float value = shard[at];
            kept[at] = value;
            shard[at] = widened(rounded(value, offset + uint32_t(at), key));
        }
    });
}
