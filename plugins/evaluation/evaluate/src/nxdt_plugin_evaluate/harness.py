"""A checkpoint as a model of EleutherAI's lm-evaluation-harness. Importing this needs that library.

What it answers is what the library's own ``hf`` model answers of the exported checkpoint.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from datasets.exceptions import DatasetsError
from jinja2.exceptions import TemplateError
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from nxdt_core.data.tokens import text_ids
from nxdt_core.distributed.devices import HOST
from nxdt_core.errors.base import listing
from nxdt_core.train.generate import LoadedModel, Sampling
from nxdt_plugin_evaluate.errors import TaskRecordUnscorable, TaskSamplesOtherwise, TaskUnknown, TaskUnusable

_MAX_NEW_TOKENS = 256
"""Limit of an answer for tasks that set none; the ``hf`` model has the same."""
_UNDERSTOOD = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_WITHOUT_EFFECT = {"num_beams": 1}
"""Settings at which they do nothing."""
_OF_DRAWS = {"typical_p"}
"""Settings that do nothing where the likeliest token is taken."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the library has no types
    """Answers the three kinds of requests that tasks make."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded

    @property
    def eot_token_id(self) -> int:
        """The token that precedes a text without context."""
        tokenizer = self._loaded.tokenizer
        return next(id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id, 0) if id_ is not None)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, preceded by the tokenizer's prefix unless the text begins with it already."""
        tokenizer, keys = self._loaded.tokenizer, self._loaded.chat_keys
        plain = add_special_tokens is False
        return tokenizer.encode(string) if plain else text_ids(string, tokenizer, add_bos=keys.add_bos)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, window by window."""
        limits = {"prefix_token": self.eot_token_id, "max_seq_len": self._loaded.window, "context_len": 1}
        texts = (self.tok_encode(request.args[0]) for request in tqdm(requests, disable=disable_tqdm))
        windows = (get_rolling_token_windows(token_list=ids, **limits) for ids in texts)
        return [sum(self._scored(*make_disjoint_window(window))[0] for window in parts) for parts in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes behind each context, up to the first of the task's stop strings."""
        rows = enumerate(tqdm(requests, disable=disable_tqdm))
        return [self._written(*request.args, seed=number) for number, request in rows]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, rest) for _, context, rest in tqdm(requests, disable=disable_tqdm)]

    def _scored(self, context: Sequence[int], rest: Sequence[int]) -> tuple[float, bool]:
        """The log-probability of ``rest`` after ``context``, and whether greedy decoding would produce ``rest``.

        A long context is cut to its last tokens. All rows of the model count, as in training.
        """
        window = self._loaded.window
        if not rest:
            raise TaskRecordUnscorable(reason="its answer adds no token to its question")
        if len(rest) > window:
            raise TaskRecordUnscorable(
                reason=f"it has {len(rest)} tokens, and the model sees {window} (its positions, or --window)"
            )
        ids = torch.tensor([*context, *rest][-(window + 1) :])
        logits = self._loaded.model.forward(ids[None, :-1])[0, -len(rest) :].float().to(HOST)
        log_probs, wanted = logits.log_softmax(-1), ids[-len(rest) :]
        likeliest = bool((log_probs.argmax(-1) == wanted).all())
        return float(log_probs.gather(1, wanted[:, None]).sum()), likeliest

    def _written(self, context: str, asked: dict[str, Any], *, seed: int) -> str:
        settings: dict[str, Any] = {**normalize_gen_kwargs(asked, _MAX_NEW_TOKENS)}
        stops = [stop for stop in settings["until"] if stop]
        drawn = bool(settings["do_sample"])
        for name, value in settings.items():
            idle = value is None or value == _WITHOUT_EFFECT.get(name) or (name in _OF_DRAWS and not drawn)
            if name not in _UNDERSTOOD and not idle:
                raise TaskSamplesOtherwise(name=name, value=value, known=tuple(sorted(_UNDERSTOOD)))
        sampling = Sampling(
            max_new_tokens=settings["max_gen_toks"],
            temperature=settings.get("temperature", 1.0) if drawn else 0.0,
            top_k=settings.get("top_k") or None,
            top_p=settings.get("top_p"),
            min_p=settings.get("min_p"),
            repetition_penalty=settings.get("repetition_penalty") or 1.0,
            stop=tuple(stops),
            seed=seed,  # differs between requests, since some have the same text
        )
        room = self._loaded.window - sampling.max_new_tokens
        ids = (self.tok_encode(context) or [self.eot_token_id])[-room if room > 0 else 0 :]
        ((text,),) = self._loaded.writer.texts([ids], sampling)
        cut: str = postprocess_generated_text(text, stops, None)
        return cut


def find_tasks(tasks: Sequence[str], path: str | None) -> TaskManager:
    """Return what the library knows of its tasks and of those in the directory ``path``.

    Raises:
        TaskUnknown: one of ``tasks`` is not among them.
    """
    if path is not None:
        own = TaskManager(include_path=path, include_defaults=False)
        if {*own.all_subtasks}.issuperset(tasks):  # groups may name the library's, which take many seconds to read
            return own
    manager = TaskManager(include_path=path)
    for task in tasks:
        if task not in manager.all_tasks:
            raise TaskUnknown(task=task, candidates=tuple(difflib.get_close_matches(task, manager.all_tasks)))
    return manager


def run_tasks(loaded: LoadedModel, tasks: Sequence[str], manager: TaskManager, *, limit: int | None) -> dict[str, Any]:
    """Return the figures by task, as the harness gives them.

    Args:
        loaded: the model.
        tasks: their names.
        manager: knows them.
        limit: records of each task; None takes all.

    Raises:
        TaskUnusable: the records of a task are not available, or its templates do not fit them.
        TaskRecordUnscorable, TaskSamplesOtherwise: a task asks for what cannot be answered.
    """
    model = HarnessModel(loaded)
    try:
        found = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0)
    except (OSError, DatasetsError, TemplateError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise TaskUnusable(tasks=listing([*tasks]), reason=reason) from error
    figures: dict[str, Any] = found["results"]
    return figures
