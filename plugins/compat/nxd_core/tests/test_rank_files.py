"""``parallel_layers.save`` and ``load``: a file per rank, in NxD Core's older layout, read without running anything."""

import sys
import types
from functools import cache

import nxdt_plugin_nxd_core as nxd
import pytest
import torch
from nxdt_plugin_nxd_core import parallel_layers
from nxdt_testing.ranks import RankPool

from nxdt_core.errors import NxdtError
from plugins.compat.nxd_core.tests.loops import Decoder, batch, groups_of, whole
from tests.calls import Call, run_in_turn
from tests.sampling import slow_except

PIPELINE = {"pipeline_parallel_size": 2, "pipeline_config": {"num_microbatches": 2}}


class Fused(Decoder):
    """Its attention has the layer that NxD Core fuses."""

    def __init__(self):
        super().__init__(numbers=2)
        for layer in self.layers:
            attention = layer.attention
            attention.grouped = True
            attention.qkv = parallel_layers.GQAQKVColumnParallelLinear(
                8, (8, 4), gather_output=False, dtype=torch.float64
            )


def begin(config, seed=7, model_fn=Fused):
    torch.manual_seed(seed)
    nxd_config = nxd.neuronx_distributed_config(**config)
    model = nxd.initialize_parallel_model(nxd_config, model_fn)
    groups = groups_of(model.named_parameters())
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, groups, lr=0.01)
    return nxd_config, model, optimizer


def train(model, optimizer, steps):
    place, losses = model.nxd_config.engine.rank_info, []
    for step in steps:
        ids = batch(step).chunk(place.dp_size)[place.dp_rank]
        losses.append(float(model.run_train(input_ids=ids, labels=ids)))
        optimizer.step()
    return losses


def save_and_continue(path, config):
    nxd_config, model, optimizer = begin(config)
    train(model, optimizer, range(2))
    parallel_layers.save({"model": model.state_dict(), "step": 2}, path)
    parallel_layers.save({"optimizer": optimizer.state_dict()}, f"{path}/optimizer")
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    parallel_layers.save(both, f"{path}/each", master_dp_only=False)
    parallel_layers.save(model.state_dict(), f"{path}/half", down_cast_bf16=True)
    after = train(model, optimizer, range(2, 4))
    nxd_config.engine.shutdown()
    return after


def state_of(model, optimizer):
    held = [*model.state_dict().values(), *optimizer.core.state_dict().values()]
    return [whole(getattr(value, "tensor", value)) for value in held]


def load_and_continue(path, config):
    nxd_config, model, optimizer = begin(config, seed=8)
    parallel_layers.load(f"{path}/each", model, master_dp_only=False)
    parallel_layers.load(f"{path}/each", optimizer, model_key="optimizer", master_dp_only=False)
    own = state_of(model, optimizer)
    train(model, optimizer, range(1))
    rest = parallel_layers.load(path, model)
    parallel_layers.load(f"{path}/optimizer", optimizer, model_key="optimizer")
    assert all(torch.equal(one, other) for one, other in zip(own, state_of(model, optimizer), strict=True))
    after = train(model, optimizer, range(2, 4))
    kept = parallel_layers.load(f"{path}/half")
    nxd_config.engine.shutdown()
    return rest, after, {str(value.dtype) for value in kept.values()}


ZERO = {"optimizer_config": {"zero_one_enabled": True}}


TP = {"tensor_parallel_size": 2}
LAYOUTS = {"tp2": (2, TP), "pp2": (2, PIPELINE), "zero1": (2, ZERO), "tp2-zero1": (4, {**ZERO, **TP})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(name)``: the directory of the files of a layout, and the losses that followed on each rank."""

    @cache
    def save(name):
        size, config = LAYOUTS[name]
        path = tmp_path_factory.mktemp(name)
        return path, RankPool(size, lasting=True).run(save_and_continue, str(path), config)

    return save


@pytest.mark.parametrize("name", slow_except(LAYOUTS, ("tp2", "zero1")))
def test_training_continues_bit_equal_from_the_files_of_its_layout(saved, name):
    size, config = LAYOUTS[name]
    path, continued = saved(name)
    for rank, found in enumerate(RankPool(size, lasting=True).run(load_and_continue, str(path), config)):
        rest, after, dtypes = found
        assert rest == {"step": 2}
        assert after == continued[rank]
        assert dtypes == {"torch.float64"}  # of all dtypes, float32 alone is cast down


def tensors_of(path):
    return torch.load(path, weights_only=True)["model"]


def test_files_have_the_names_and_the_shards_of_nxd_core(saved):
    path, _ = saved("tp2")
    folders = [f"tp_rank_0{rank}_pp_rank_00" for rank in range(2)]
    assert sorted(each.name for each in path.iterdir()) == ["each", "half", "optimizer", *folders]
    ranks = [tensors_of(path / folder / "checkpoint.pt") for folder in folders]
    layer = "layers.0.attention.qkv"
    assert {name for name in ranks[0] if name.startswith(layer)} == {f"{layer}.weight_qkv", f"{layer}.bias_qkv"}
    assert all(rank[f"{layer}.weight_qkv"].shape == (8, 8) for rank in ranks)  # 4 of 8 rows of q, 2 of 4 of k, of v
    assert ranks[0]["layers.0.down.weight"].shape == (8, 16)
    assert ranks[0]["embed.weight"].shape == (8, 8)


class TensorReference:
    def __init__(self, tid):
        self.tid = tid


TensorReference.__module__ = "torch_xla.utils.serialization"


def split_of(whole_weights, rank, form):
    """A rank's tensors as NxD Core names them: by slices, with no code of nxdt."""
    own = {}
    for name, value in whole_weights.items():
        layer = name.rpartition(".")[0].rpartition(".")[2]
        if ".qkv." in name:
            prefix, letter, kind = name.rsplit(".", 2)
            own[f"{prefix}.{kind}_{letter}"] = value.chunk(2)[rank]
        elif layer in ("up", "gate", "head", "embed"):
            own[name] = value.chunk(2)[rank]
        elif layer in ("down", "out", "mix") and value.ndim == 2:
            own[name] = value.chunk(2, 1)[rank]
        else:
            own[name] = value
    for name in [name for name in own if name.endswith("_q") and form == "fused"]:
        stem = name.removesuffix("_q")
        own[f"{stem}_qkv"] = torch.cat([own.pop(f"{stem}_{letter}") for letter in "qkv"])
    return {name: value.clone() for name, value in own.items()}


def write_as_nxd_core(path, whole_weights, form):
    for rank in range(2):
        own, file = split_of(whole_weights, rank, form), path / f"tp_rank_0{rank}_pp_rank_00"
        if form != "xser":
            file.mkdir(parents=True)
            torch.save({"model": own}, file / "checkpoint.pt")
            continue
        tensors = path / f"{file.name}.tensors"
        tensors.mkdir(parents=True)
        for number, value in enumerate(own.values()):
            torch.save(value, tensors / f"tensor_{number}.pt")
        module = types.ModuleType(TensorReference.__module__)
        module.TensorReference = TensorReference
        sys.modules |= {"torch_xla": types.ModuleType("torch_xla"), "torch_xla.utils": types.ModuleType("utils")}
        sys.modules[module.__name__] = module
        try:
            torch.save({"model": {name: TensorReference(number) for number, name in enumerate(own)}}, file)
        finally:
            for name in ("torch_xla", "torch_xla.utils", module.__name__):
                del sys.modules[name]


def load_into_another(path, config, load_xser, sharded):
    nxd_config, model, _ = begin(config, seed=8)
    parallel_layers.load(path, model_or_optimizer=model, load_xser=load_xser, sharded=sharded)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    nxd_config.engine.shutdown()
    return weights


FORMS = ("fused", "linear", "xser")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Whole weights, and those that each of two ranks has from files of NxD Core and from a file of whole tensors."""
    torch.manual_seed(7)
    weights = {name: value.detach() for name, value in Fused().named_parameters()}
    path = tmp_path_factory.mktemp("old")
    for form in FORMS:
        write_as_nxd_core(path / form, weights, form)
    torch.save({"model": weights}, path / "whole.pt")
    cases = {form: (str(path / form), TP, form == "xser", True) for form in FORMS}
    cases |= {name: (str(path / "whole.pt"), config, False, False) for name, config in (("tp2", TP), ("pp2", PIPELINE))}
    return weights, run_in_turn({name: Call(2, load_into_another, arguments) for name, arguments in cases.items()})


@pytest.mark.parametrize("form", FORMS)
def test_files_of_nxd_core_are_read_in_their_layout(loaded, form):
    weights, by_case = loaded
    for found in by_case[form]:
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_file_of_whole_tensors_is_sharded_as_it_is_loaded(loaded):
    weights, by_case = loaded
    for layout in ("tp2", "pp2"):
        assert {name for found in by_case[layout] for name in found} == weights.keys()
        assert all(torch.equal(weights[name], value) for found in by_case[layout] for name, value in found.items())


@pytest.fixture
def run():
    begun = begin({})
    yield begun
    begun[0].engine.shutdown()


def refused(code, words):
    return pytest.raises(NxdtError, match=rf"(?s)\[{code}\].*{words}")


class Runs:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        ({"model": Runs()}, "NXDT-T066", "builtins.print', which could run code"),
        ({"weights": {}}, "NXDT-T065", "model_key with one of: 'weights'"),
        ({"model": {"embed.weight": 1}}, "NXDT-T066", "'embed.weight' is a int"),
        ({"model": {"embed.weight": torch.ones(2)}}, "NXDT-M050", "embed.weight"),
        ([1], "NXDT-T066", "a list instead of a dictionary"),
        (None, "NXDT-T066", "not an archive of torch.save"),
    ],
)
def test_files_that_cannot_be_loaded(run, tmp_path, capsys, content, code, words):
    path = tmp_path / "tp_rank_00_pp_rank_00/checkpoint.pt"
    path.parent.mkdir()
    torch.save(content, path)
    if content is None:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(NxdtError, match=rf"(?s)\[({code}).*{words}"):
        parallel_layers.load(str(tmp_path), run[1])
    assert capsys.readouterr().out == ""


def test_calls_that_cannot_be(run, tmp_path):
    _, model, optimizer = run
    (tmp_path / "tp_rank_01_pp_rank_00").mkdir()
    with refused("NXDT-T065", "is of tensor_parallel_size=2"):
        parallel_layers.load(str(tmp_path), model)
    with refused("NXDT-T065", "no files tp_rank"):
        parallel_layers.load(str(tmp_path / "nowhere"), model)
    with refused("NXDT-T065", "is not a file"):
        parallel_layers.load(str(tmp_path / "nowhere"), model, sharded=False)
    with refused("NXDT-T050", "sharded"):
        parallel_layers.load(str(tmp_path), sharded=False)
    with refused("NXDT-T058", "model_or_optimizer is Linear"):
        parallel_layers.load(str(tmp_path), torch.nn.Linear(2, 2))
    with refused("NXDT-T050", r"state_dict\['a'\]\[0\]=object"):
        parallel_layers.save({"a": [object()]}, str(tmp_path / "objects"))
    assert not (tmp_path / "objects").exists()
    with refused("NXDT-T063", "save_dir"):
        parallel_layers.save({})
    (tmp_path / "file").write_text("")
    with refused("NXDT-T065", "cannot be written"):
        parallel_layers.save({}, str(tmp_path / "file"))
    parallel_layers.save({"model": model.state_dict(), "optimizer": {"state": {0: {}}}}, str(tmp_path / "both"))
    with refused("NXDT-T065", "master_dp_only=True"):
        parallel_layers.load(str(tmp_path / "both"), model, master_dp_only=False)
    with refused("NXDT-T065", "no state that this optimizer saved"):
        parallel_layers.load(str(tmp_path / "both"), optimizer, model_key="optimizer")


def one_rank_fails(path):
    nxd_config, model, _ = begin({"tensor_parallel_size": 2})
    parallel_layers.save({"model": model.state_dict()}, path)
    name = f"{path}/tp_rank_01_pp_rank_00/checkpoint.pt"
    if nxd_config.engine.rank_info.rank == 1:
        with open(name, "r+b") as file:
            file.truncate(50)
    with refused("NXDT-T066", "tp_rank_01"):
        parallel_layers.load(path, model)
    nxd_config.engine.shutdown()


def test_what_one_rank_cannot_read_fails_on_all(tmp_path):
    RankPool(2).run(one_rank_fails, str(tmp_path))


def copies(path):
    """Keys and values that ranks hold copies of are saved, and files of NxD Core with copies are refused."""
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=4)
    model = nxd.initialize_parallel_model(nxd_config, Decoder, kv_size_multiplier=2, numbers=2)
    before = {name: whole(value) for name, value in model.state_dict().items()}
    parallel_layers.save({"model": model.state_dict()}, path)
    parallel_layers.load(path, model)
    same = all(torch.equal(whole(value), before[name]) for name, value in model.state_dict().items())
    foreign = {"layers.0.attention.qkv.weight_q": torch.ones(1)}
    parallel_layers.save({"model": foreign}, f"{path}/foreign")
    with refused("NXDT-T065", "copies of keys and values"):
        parallel_layers.load(f"{path}/foreign", model, strict=False)
    nxd_config.engine.shutdown()
    return same


def test_copies_of_keys_are_saved_and_those_of_nxd_core_refused(tmp_path):
    assert RankPool(4).run(copies, str(tmp_path)) == [True] * 4
