"""A checkpoint as a model of EleutherAI's lm-evaluation-harness. Importing this needs that library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from nxdt_core.devices import HOST
from nxdt_core.training.continuation import Sampling
from nxdt_core.training.loaded import LoadedModel

__all__ = ["HarnessModel", "run_tasks"]

_MAX_NEW_TOKENS = 256
"""Where a task does not say."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library has no types
    """Answers the three kinds of requests that tasks make."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded

    @property
    def eot_token_id(self) -> int:
        """What stands before a text that nothing precedes."""
        tokenizer = self._loaded.tokenizer
        return next(id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id, 0) if id_ is not None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text, without special tokens at its ends."""
        return self._loaded.tokenizer.encode(string)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text, window by window."""
        found = []
        for request in tqdm(requests, disable=disable_tqdm):
            ids, window = self.tok_encode(request.args[0]), self._loaded.window
            windows = get_rolling_token_windows(
                token_list=ids, prefix_token=self.eot_token_id, max_seq_len=window, context_len=1
            )
            parts = [make_disjoint_window(part) for part in windows]
            found.append(sum(self._scored(list(context), list(rest))[0] for context, rest in parts))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind each context, up to the first of the task's stop strings."""
        return [self._written(*request.args) for request in tqdm(requests, disable=disable_tqdm)]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, rest) for _, context, rest in tqdm(requests, disable=disable_tqdm)]

    def _scored(self, context: Sequence[int], rest: Sequence[int]) -> tuple[float, bool]:
        """Log-probability of ``rest`` behind ``context``, and whether it is what the model would have written."""
        ids = torch.tensor([*context, *rest][-(self._loaded.window + 1) :])
        logits = self._loaded.model.forward(ids[None, :-1])[0].float().to(HOST)[-len(rest) :]
        log_probs = logits[:, : self._loaded.tokenizer.vocab_size].log_softmax(-1)
        wanted = ids[-len(logits) :]
        likeliest = bool((log_probs.argmax(-1) == wanted).all())
        return float(log_probs.gather(1, wanted[:, None]).sum()), likeliest

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        sampling = Sampling(
            max_new_tokens=settings.get("max_gen_toks", _MAX_NEW_TOKENS),
            temperature=settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0,
        )
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        ids, written, text = self.tok_encode(context) or [self.eot_token_id], [], ""
        for token in self._loaded.continuation(ids, sampling):
            written.append(token)
            text = self._loaded.tokenizer.decode(written)
            if any(stop in text for stop in stops if stop):
                break
        return min((text.partition(stop)[0] for stop in stops if stop), key=len, default=text)


def run_tasks(loaded: LoadedModel, tasks: Sequence[str], *, path: str | None, limit: int | None) -> dict[str, Any]:
    """Figures by task, as the harness gives them.

    Args:
        loaded: the model.
        tasks: their names.
        path: a directory with tasks of one's own.
        limit: records of each task; None takes all.

    Raises:
        TaskUnknown: the harness has none of that name.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from nxdt_core.errors import TaskUnknown

    manager = TaskManager(include_path=path)
    for task in tasks:
        if task not in manager.all_tasks:
            raise TaskUnknown(task=task)
    found = simple_evaluate(
        model=HarnessModel(loaded), tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0
    )
    figures: dict[str, Any] = found["results"]
    return figures
