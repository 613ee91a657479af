"""The callback ``generations``: what the model writes behind some prompts, at each validation."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, final

from nxdt_core.callback import Callback, Run
from nxdt_core.data.chat.rendering import prompt_ids
from nxdt_core.data.tokens import text_ids
from nxdt_core.errors.training import GenerationsNeedTokenizer
from nxdt_core.run.callbacks.config import GenerationsConfig
from nxdt_core.system.regular_files import regular_opener
from nxdt_core.system.visible_text import visible
from nxdt_core.train import build
from nxdt_core.train.sampling import Sampling, Writer

_log = logging.getLogger(__name__)

_FILE = "generations.jsonl"


class TextLog(Callback):
    """Base of callbacks that give texts to loggers, such as TensorBoard, and to ``generations.jsonl`` of the run."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._failed = False
        """True once a text could not be written."""

    def _log(self, run: Run, name: str, rows: Iterable[Mapping[str, Any]], text: str) -> None:
        """Write rows with ``prompt`` and ``text`` to the file, and give loggers one text under ``name``."""
        try:
            with open(self._run_dir / _FILE, "a", encoding="utf-8", opener=regular_opener) as file:
                file.writelines(json.dumps({"step": run.step, **row}) + "\n" for row in rows)
        except OSError as error:
            if not self._failed:
                _log.warning("%s/%s is incomplete: %s", self._run_dir, _FILE, error.strerror or error)
            self._failed = True
        # As code: of other Markdown, TensorBoard would load a picture that it names.
        run.log_text(name, "\n".join(f"    {line}" for line in visible(text).splitlines()))


@final
class Generations(TextLog):
    """Continuations of the configured prompts, each a separate text."""

    _config: GenerationsConfig

    def on_fit_start(self, run: Run) -> None:
        """Say what would fail at the first validation.

        Raises:
            GenerationsNeedTokenizer: the run has no tokenizer.
        """
        if run.session.data.tokenizer is None:
            raise GenerationsNeedTokenizer()

    def on_validation_end(self, run: Run) -> None:
        """Write behind each prompt; on all ranks, which share the work of each token.

        Raises:
            ChatTemplateMissing, TemplateUnreadable, TemplateRefuses: of prompts that are to be a user's turn.
        """
        tokenizer, config = run.session.data.tokenizer, self._config
        assert tokenizer is not None  # else the run would not have started
        sampling = Sampling(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, top_k=config.top_k, seed=config.seed
        )
        keys = build.chat_keys(run.config)
        window = build.window(run.config)
        writer = Writer(model=run.session.model, tokenizer=tokenizer, window=window, stop_ids=run.session.stop_ids)
        prompts = []
        for prompt in config.prompts:
            if config.chat:
                turn = [{"role": "user", "content": prompt}]
                prompts.append(prompt_ids(turn, tokenizer, keys, place="trainer.callbacks: generations"))
            else:
                prompts.append(text_ids(prompt, tokenizer, add_bos=keys.add_bos))
        for number, (prompt, (text,)) in enumerate(zip(config.prompts, writer.texts(prompts, sampling), strict=True)):
            if run.rank == 0:
                self._log(run, f"generations/{number}", [{"prompt": prompt, "text": text}], prompt + text)
