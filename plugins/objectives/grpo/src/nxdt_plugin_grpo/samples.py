"""The callback ``samples``: answers of some steps with their rewards and advantages."""

from __future__ import annotations

import json
from typing import final

from nxdt_core.callback import Run
from nxdt_core.run.callbacks.generations import TextLog
from nxdt_plugin_grpo.config import SamplesConfig
from nxdt_plugin_grpo.objective import Grpo


@final
class Samples(TextLog):
    """A table of the answers to the first prompts of a step, for loggers and ``generations.jsonl``."""

    _config: SamplesConfig

    def on_step_end(self, run: Run) -> None:
        """Write the table, on the first rank."""
        objective, tokenizer = run.session.objective, run.session.data.tokenizer
        if run.rank or run.step % self._config.every_n_steps or not isinstance(objective, Grpo):
            return
        rows = [
            {
                "prompt": tokenizer.decode(group.prompt),
                "text": tokenizer.decode(answer),
                "rewards": {name: scores[number] for name, scores in group.rewards.items()},
                "advantage": advantages[number],
            }
            for group, advantages in objective.samples[: self._config.prompts]
            for number, answer in enumerate(group.answers)
        ]
        lines = ["  ".join(["advantage", *rows[0]["rewards"], "prompt, answer"])]
        for row in rows:
            scores = {"advantage": row["advantage"], **row["rewards"]}
            figures = (f"{'none' if score is None else f'{score:.4g}':>{len(name)}}" for name, score in scores.items())
            lines.append("  ".join([*figures, json.dumps(row["prompt"]), json.dumps(row["text"])]))
        self._log(run, "samples", rows, "\n".join(lines))
