"""What ``flashbench io-model`` says of alternatives among its models: what they are, where they cross."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request

AGAINST = "flash-v2"
QUANTITIES = ("flops", "exps", "requested")


def notes(request: Request) -> list[str]:
    """A line per alternative: the lengths from which it needs less than flash-v2, and its assumptions."""
    from flashbench._iomodel import alternatives
    from flashbench.errors import FlashbenchError

    found = []
    for name in request.names:
        if not alternatives.is_one(name):
            continue
        try:
            said = _decode(name, request) if request.mode == "decode" else _lengths(name, request)
        except FlashbenchError:  # it has no fixed state, or does not cover some length
            said = f"not compared with {AGAINST}"
        found.append(f"{name} is no exact attention; {said}; {alternatives.find(name).assumptions}")
    return found


def _lengths(name: str, request: Request) -> str:
    from flashbench import crossover

    problem = request.problems[0]
    parts = [str(crossover.length(name, problem, quantity, against=AGAINST)) for quantity in QUANTITIES]
    return f"against {AGAINST} forward, d = {problem.head_dim}: {', '.join(parts)}"


def _decode(name: str, request: Request) -> str:
    from flashbench import crossover

    tokens = crossover.decode_length(name, request.problems[0])
    return f"from {tokens:,} cached tokens on, keys and values are more than its state"
