"""``nxdt explain``: what an error code means, without a network."""

from __future__ import annotations

import click

from nxdt_core.cli.terminal.table import print_facts
from nxdt_core.cli.verb import Verb, as_json, print_json, say

__all__ = ["explain"]

_PREFIX = "NXDT-"


@click.command(
    cls=Verb,
    short_help="Explain an error code: cause, example and fix.",
    examples=("nxdt explain NXDT-C016", "nxdt explain C010 C016 --json"),
)
@click.argument("codes", metavar="CODE...", nargs=-1, required=True)
@as_json
def explain(codes: tuple[str, ...], json_output: bool) -> None:
    """Explain error codes: cause, message, examples and fix, as on the documentation's page of error codes.

    The prefix NXDT- may be left out. A value that a message fills in is written ‹name›.
    """
    from nxdt_core.cli.explain.catalogue import error_codes, explanations
    from nxdt_core.errors.plugins import UnknownErrorCode

    wanted = [_PREFIX + code.strip("[]").upper().removeprefix(_PREFIX) for code in codes]
    known = explanations(wanted)
    for code in wanted:
        if code not in known:
            raise UnknownErrorCode(wanted=code, known=tuple(sorted(error_codes())))
    if json_output:
        print_json(
            [
                {
                    "code": each.code,
                    "cause": each.cause,
                    "message": each.message,
                    "fix": each.fix,
                    "examples": [{"found": found, "fix": fix or None} for found, fix in each.examples],
                }
                for each in map(known.__getitem__, wanted)
            ]
        )
        return
    for number, code in enumerate(wanted):
        each = known[code]
        say("", end="\n" if number else "")
        facts = [("code", each.code), ("cause", each.cause), ("message", each.message), ("fix", each.fix)]
        facts += [("example", f"{found}.{' ' + fix if fix else ''}") for found, fix in each.examples]
        print_facts(facts)
