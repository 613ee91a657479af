"""transformers does not train the padding token's row of the embedding from the input, and the class is its own."""

from __future__ import annotations

import torch

END = 7


def test_the_padding_row_has_no_gradient_as_in_transformers(builder, materialised):
    made = builder("qwen3", eos_token_id=END, pad_token_id=END, tie_word_embeddings=False, num_hidden_layers=1)
    model = materialised(made)
    ids = torch.full((1, 12), END).index_fill_(1, torch.tensor([3]), 9)
    model(ids).square().sum().backward()
    gradient = model.get_parameter("model.embed_tokens.weight").grad
    assert (gradient[END] == 0).all()
    assert gradient[9].abs().max() > 0
