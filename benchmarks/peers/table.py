"""From samples to rows, and rows as a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reference import Closeness

OUTRIDER = "outrider"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer. ``seconds``: of the whole answer, the prompt included. ``first_seconds``: of an
    answer of one token to the same prompt, measured just before. ``group``: of the engines that
    were loaded at the same time."""

    engine: str
    dtype: str
    mode: str
    prompt: str
    repeat: int
    group: int
    ids: list[int]
    seconds: float
    first_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An engine in one mode, with what is known of it. ``failure``: why it was not measured to
    the end. ``plain``: it is plain decoding."""

    engine: str
    version: str
    dtype: str
    mode: str
    plain: bool
    notes: tuple[str, ...] = ()
    failure: str | None = None
    closeness: Closeness | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``rate``, ``low``, ``high``: tokens/s of whole answers, the median, the lowest and the
    highest over the repeats, each of them tokens by seconds summed over the prompts.
    ``decode_rate``: the median without the prompt and the first token. ``by_plain``, ``by_best``:
    ``rate`` by that of the best peer's plain decoding, and of the best peer in any mode;
    ``decode_by_plain``, ``decode_by_best``: the same of ``decode_rate``. None: not measured.
    ``same``: answers with the tokens of the engine's own plain decoding, and how many there are.
    """

    contender: Contender
    rate: float | None = None
    low: float | None = None
    high: float | None = None
    decode_rate: float | None = None
    by_plain: float | None = None
    by_best: float | None = None
    decode_by_plain: float | None = None
    decode_by_best: float | None = None
    same: tuple[int, int] | None = None


def in_one_measure(samples: Sequence[Sample], yardstick: tuple[str, str, str]) -> list[Sample]:
    """``samples`` with their seconds scaled, group by group, so that the yardstick (engine, dtype,
    mode) takes the same time in each: the median over all groups and repeats. What the machine
    does from one hour to the next then cancels out. A group without it stays as it is."""
    own = [s for s in samples if _key(s) == yardstick]
    rates = {
        number: _rates([s for s in own if s.group == number]) for number in {s.group for s in own}
    }
    whole = statistics.median([rate for group in rates.values() for rate in group]) if own else 1.0
    scale = {number: statistics.median(group) / whole for number, group in rates.items()}
    return [
        replace(
            s,
            seconds=s.seconds * scale.get(s.group, 1.0),
            first_seconds=s.first_seconds * scale.get(s.group, 1.0),
        )
        for s in samples
    ]


def make_rows(contenders: Sequence[Contender], samples: Sequence[Sample]) -> list[Row]:
    """One row per contender, in their order."""
    own = {c: [s for s in samples if _key(s) == (c.engine, c.dtype, c.mode)] for c in contenders}
    rates = {c: _rates(mine) for c, mine in own.items() if mine and not c.failure}
    decode = {c: _decode_rate(mine) for c, mine in own.items() if mine and not c.failure}
    middle = {c: statistics.median(values) for c, values in rates.items()}
    rows = []
    for c in contenders:
        if c not in rates:
            rows.append(Row(contender=c))
            continue
        rows.append(
            Row(
                contender=c,
                rate=middle[c],
                low=min(rates[c]),
                high=max(rates[c]),
                decode_rate=decode[c],
                by_plain=_by(middle[c], _best(middle, plain=True)),
                by_best=_by(middle[c], _best(middle)),
                decode_by_plain=_by(decode[c], _best(decode, plain=True)),
                decode_by_best=_by(decode[c], _best(decode)),
                same=None if c.plain else _same(c, own),
            )
        )
    return rows


def _key(sample: Sample) -> tuple[str, str, str]:
    return sample.engine, sample.dtype, sample.mode


def _repeats(samples: Sequence[Sample]) -> list[list[Sample]]:
    numbers = sorted({(s.group, s.repeat) for s in samples})
    return [[s for s in samples if (s.group, s.repeat) == number] for number in numbers]


def _rates(samples: Sequence[Sample]) -> list[float]:
    return [
        sum(len(s.ids) for s in group) / sum(s.seconds for s in group)
        for group in _repeats(samples)
    ]


def _decode_rate(samples: Sequence[Sample]) -> float | None:
    """Over the tokens after the first. None where the difference is nothing that can be told
    apart."""
    rates = []
    for group in _repeats(samples):
        seconds = sum(s.seconds - s.first_seconds for s in group)
        tokens = sum(len(s.ids) - 1 for s in group)
        if seconds <= 0 or tokens <= 0:
            return None
        rates.append(tokens / seconds)
    return statistics.median(rates)


def _best(rates: Mapping[Contender, float | None], *, plain: bool = False) -> float | None:
    """Of the peers."""
    known = [
        rate
        for c, rate in rates.items()
        if rate is not None and c.engine != OUTRIDER and (c.plain or not plain)
    ]
    return max(known, default=None)


def _by(rate: float | None, other: float | None) -> float | None:
    return None if rate is None or other is None else rate / other


def _same(c: Contender, own: Mapping[Contender, list[Sample]]) -> tuple[int, int] | None:
    """Against the plain decoding of the same engine and dtype. llama.cpp is one engine, by
    library and by server, but the two are told apart here."""
    plain = next((p for p in own if (p.engine, p.dtype) == (c.engine, c.dtype) and p.plain), None)
    if plain is None:
        return None
    answers = {(s.prompt, s.repeat): s.ids for s in own[plain]}
    pairs = [(s.ids, answers.get((s.prompt, s.repeat))) for s in own[c]]
    return sum(a == b for a, b in pairs if b), sum(b is not None for _, b in pairs)


HEAD = (
    *("engine", "version", "dtype", "mode", "tokens/s", "low-high", "decode tokens/s"),
    *("by best plain peer (decode)", "by best peer (decode)"),
    *("KL mean", "KL p99", "top-1", "perplexity", "notes"),
)


def markdown(rows: Sequence[Row]) -> str:
    """A table with one line per row."""
    lines = [HEAD, tuple("---" if i in (0, 1, 2, 3, 13) else "---:" for i in range(len(HEAD)))]
    lines += [_cells(row) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: Row) -> tuple[str, ...]:
    c, near = row.contender, row.contender.closeness
    spread = "-" if row.low is None or row.high is None else f"{row.low:.1f}-{row.high:.1f}"
    return (
        *(c.engine, c.version, c.dtype, c.mode),
        *(_number(row.rate, ".1f"), spread, _number(row.decode_rate, ".1f")),
        f"{_number(row.by_plain, '.2f')} ({_number(row.decode_by_plain, '.2f')})",
        f"{_number(row.by_best, '.2f')} ({_number(row.decode_by_best, '.2f')})",
        *(("-",) * 4 if near is None else _quality(near)),
        "; ".join(_notes(row)).replace("|", "/").replace("\n", " ") or "-",
    )


def _quality(near: Closeness) -> tuple[str, ...]:
    return (
        f"{near.kl_mean:.5f}",
        f"{near.kl_p99:.4f}",
        f"{near.top1:.1%}",
        f"{near.perplexity:.3f}",
    )


def _number(value: float | None, format: str) -> str:
    return "-" if value is None else f"{value:{format}}"


def _notes(row: Row) -> list[str]:
    notes = [f"FAILED: {row.contender.failure}"] if row.contender.failure else []
    if row.same is not None:
        same, count = row.same
        equal = "as own plain decoding" if same == count else f"{same} of {count} as own plain"
        notes.append(f"tokens {equal}")
    return [*notes, *row.contender.notes]
