"""The tokenizer that Megatron-LM calls ``GPT2BPETokenizer``, run by the ``tokenizers`` library."""

from __future__ import annotations

from nxdt_core.data.tokenizers.config import HuggingFaceTokenizerConfig, MegatronTokenizerConfig
from nxdt_core.data.tokenizers.huggingface import HuggingFaceTokenizer

__all__ = ["MegatronTokenizer"]


class MegatronTokenizer(HuggingFaceTokenizer):
    """GPT-2's ids. A text that spells out ``<|endoftext|>`` has that token, as in transformers.

    Raises:
        TokenizerLibraryMissing: tokenizers is not installed.
        TokenizerFileNotFound, BadTokenizerFile: of the files; each names the file.
        BadTokenizerConfig: a key names a token that is not in the vocabulary.
    """

    def __init__(self, config: MegatronTokenizerConfig) -> None:
        super().__init__(
            HuggingFaceTokenizerConfig(
                vocab_file=config.vocab_file,
                merge_file=config.merge_file,
                bos_token=config.bos_token,
                eos_token=config.eos_token,
                pad_token=config.pad_token,
            )
        )
