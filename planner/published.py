"""Rows of a table of training runs, read into runs that can be estimated.

The header is that of the tables people publish: an architecture, a device, a layout,
and what was measured. What a row leaves out is filled in by the rules below, and every
rule that was used is named beside the row.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whalejax.meshes.catalogue import Entry
from whalejax.meshes.named import read_device
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.planner.decoder import Decoder
from whalejax.planner.frameworks import Framework, Remat, framework
from whalejax.planner.runs import Replica, Run, StageOf


COLUMNS = (
    "source url_or_repo_path model params_b layers hidden heads kv_heads ffn vocab seq "
    "experts topk device num_devices devices_per_node dp fsdp zero_stage tp sp pp vpp "
    "cp ep micro_batch global_batch remat precision step_time_s tflops_per_device mfu "
    "tokens_per_s_per_device peak_mem_gib"
).split()
"""Columns that are read; others pass through. ``notes`` may give a mixed pipeline."""

NEEDED = ("layers", "hidden", "seq", "global_batch", "num_devices")
"""Without one of these nothing can be predicted."""

_POSITIVE = frozenset(
    (
        "layers hidden heads kv_heads ffn vocab seq num_devices devices_per_node dp "
        "fsdp tp pp vpp cp ep micro_batch global_batch"
    ).split()
)
_NUMBERS = _POSITIVE | {
    "params_b",
    "experts",
    "topk",
    "zero_stage",
    "step_time_s",
    "tflops_per_device",
    "mfu",
    "tokens_per_s_per_device",
    "peak_mem_gib",
}

GATED = (
    "llama fuji internlm mistral mixtral gemma qwen deepseek yi- grok dbrx olmo palm"
).split()
"""Words in a model's name that mean a gated feed-forward, RMSNorm and untied ends."""

LARGEST_TOKENS = 16384
"""Of a micro-batch that is inferred where there is no pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A CSV file: its header, and its rows with the line each stands in."""

    header: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What became of a row.

    Attributes:
        run: what it describes, or None where something needed is missing.
        notes: what was inferred or mapped, or why there is no run.
        policies: what may be computed again, the likeliest first; several where
            neither the row nor the framework says it, or the row has a name of its own.
        open_micro_batch, open_zero: the row does not give the micro-batch, or what is
            sharded.
    """

    run: Run | None
    notes: tuple[str, ...]
    policies: tuple[Remat, ...] = ()
    open_micro_batch: bool = False
    open_zero: bool = False


def read_table(path: str | Path) -> Table:
    """Read a CSV file with a header.

    Raises:
        WhaleError: no such file, no header, rows of another length, cells that are no
            numbers; all of them, with line and column.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise WhaleError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise WhaleError(f"{path} is no text in UTF-8: {error.reason}") from error
    problems = Problems(str(path), WhaleError)
    reader = csv.reader(text.splitlines(keepends=True))
    try:
        lines = [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise WhaleError(f"{path}, line {reader.line_num}: {error}") from error
    if not lines:
        raise WhaleError(
            f"{path} is empty; expected a header line with {COLUMNS[0]}, …"
        )
    _, names = lines[0]
    header = tuple(name.strip() for name in names)
    missing = [name for name in (*NEEDED, "device") if name not in header]
    if missing:
        problems.add(f"line 1: no column {', '.join(missing)}")
    for name in sorted({n for n in header if header.count(n) > 1}):
        problems.add(f"line 1: the column {name!r} stands twice")
    problems.raise_if_any()
    rows, numbers = [], []
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            problems.add(
                f"line {line}: {len(cells)} cells, the header has {len(header)}"
            )
            continue
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        _check_cells(row, line, problems)
        rows.append(row)
        numbers.append(line)
    problems.raise_if_any()
    return Table(header=header, rows=tuple(rows), lines=tuple(numbers))


def _check_cells(row: Mapping[str, str], line: int, problems: Problems) -> None:
    for column, cell in row.items():
        if column not in _NUMBERS or not cell:
            continue
        try:
            value = float(cell)
        except ValueError:
            problems.add(f"line {line}, column {column}: {cell!r} is no number")
            continue
        if not math.isfinite(value) or value < 0:
            problems.add(
                f"line {line}, column {column}: {cell} is below 0 or no number"
            )
        elif column in _POSITIVE and (value < 1 or value != int(value)):
            problems.add(
                f"line {line}, column {column}: {cell}; expected a whole number of at "
                "least 1"
            )


@dataclass(slots=True)
class _Cells:
    """One row on its way to a run."""

    row: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        return (self.row.get(column) or "").strip()

    def whole(self, column: str) -> int | None:
        text = self.text(column)
        return int(float(text)) if text else None

    def or_else(self, column: str, value: int, why: str) -> int:
        """The cell, or a value that is noted."""
        found = self.whole(column)
        if found is not None:
            return found
        self.notes.append(f"{column} {value} ({why})")
        return value


def read_row(row: Mapping[str, str]) -> Reading:
    """The run that a row describes, with what was inferred.

    Args:
        row: column to cell, as ``read_table`` gives them.
    """
    cells = _Cells(row)
    missing = [name for name in NEEDED if cells.whole(name) is None]
    if missing:
        return Reading(run=None, notes=(f"no {', '.join(missing)}: nothing predicted",))
    try:
        run = _run(cells)
    except WhaleError as error:
        return Reading(run=None, notes=(str(error), *cells.notes))
    text = cells.text("remat").lower()
    policies: tuple[Remat, ...] = (run.remat,)
    if not text and run.framework.remat is None:
        policies = ("none", "selective", "full")
    elif run.remat == "dots" and text not in WORDS and not run.offloaded:
        # A policy by a name of its own keeps something, at most what fits.
        policies = ("dots", "full")
    return Reading(
        run=run,
        notes=tuple(cells.notes),
        policies=policies,
        open_micro_batch=cells.whole("micro_batch") is None,
        open_zero=cells.whole("zero_stage") is None and cells.whole("fsdp") is None,
    )


def _run(cells: _Cells) -> Run:
    source = framework(cells.text("source"))
    device = read_device(cells.text("device"), guess=True)
    cells.notes += device.notes
    count = cells.whole("num_devices") or 1
    tensor = cells.or_else("tp", 1, "none given")
    stages = cells.or_else("pp", 1, "none given")
    context = cells.or_else("cp", 1, "none given")
    expert = cells.whole("ep") or 1
    zero, fsdp = _sharding(cells, source, count // (tensor * stages * context))
    inner = fsdp * tensor * stages * context
    if count % inner:
        raise WhaleError(
            f"num_devices is {count}; fsdp {fsdp} × tp {tensor} × pp {stages} × cp "
            f"{context} = {inner} does not divide it: nothing predicted"
        )
    data = count // inner
    if cells.whole("dp") != data:
        says = f"; the row says {cells.text('dp')}" * (cells.whole("dp") is not None)
        cells.notes.append(f"dp {data} (num_devices over the other axes{says})")
    sizes = _sizes(cells, source, tensor)
    unlike = _unlike(cells, sizes)
    if device.others and not unlike:
        cells.notes.append(_as_slowest(cells, device.entry, count))
    if unlike:
        stages = len(unlike)
        data, tensor = len(unlike[0].replicas), unlike[0].replicas[0].tensor
    per_rank, over = divmod(cells.whole("global_batch") or 1, data * fsdp)
    if over or not per_rank:
        cells.notes.append(
            f"global_batch {cells.text('global_batch')} does not divide by "
            f"{data * fsdp} data ranks: rounded up"
        )
        per_rank += 1
    micro = _micro_batch(cells, per_rank, stages, sizes.seq)
    return Run(
        sizes=sizes,
        framework=source,
        device=device.entry,
        num_devices=count,
        devices_per_node=_per_node(cells, device.entry, count),
        data=data,
        fsdp=fsdp,
        tensor=tensor,
        stages=stages,
        context=context,
        expert=expert if sizes.experts else 1,
        chunks=_chunks(cells, source, sizes, stages, per_rank // micro),
        zero=zero,
        sequence_parallel=_sequence_parallel(cells, source, tensor),
        micro_batch=micro,
        global_batch=per_rank * data * fsdp,
        remat=_remat(cells, source, sizes),
        dtype=_precision(cells, source, device.entry),
        unlike=unlike,
        offloaded="offload" in cells.text("remat").lower(),
        frozen=_frozen(cells, sizes),
    )


ADAPTERS = ("lora", "adapter", "peft")
"""Words of a row that mean that the model's own parameters are not trained."""


def _frozen(cells: _Cells, sizes: Decoder) -> bool:
    """Whether only adapters are trained.

    A row says so, or counts fewer FLOPs for a token than the six of each parameter that
    a forward and two backward products take.
    """
    text = " ".join(cells.text(name) for name in ("model", "url_or_repo_path", "notes"))
    said = [word for word in ADAPTERS if word in text.lower()]
    if said:
        cells.notes.append(f"parameters frozen ({said[0]!r})")
        return True
    rate, tokens = (
        float(cells.text(name) or 0)
        for name in ("tflops_per_device", "tokens_per_s_per_device")
    )
    lookups = sizes.embedding_params - (sizes.hidden * sizes.vocab if sizes.tied else 0)
    trained = 6.0 * (sizes.active_params - lookups)
    if not tokens or not rate or rate * 1e12 / tokens >= FEWER * trained:
        return False
    cells.notes.append("parameters frozen (two thirds of a training step's FLOPs)")
    return True


FEWER = 0.8
"""Of a training step's products, below which parameters are not trained."""


def _sharding(cells: _Cells, source: Framework, ranks: int) -> tuple[int, int]:
    """ZeRO level and the size of the fsdp axis."""
    fsdp = cells.whole("fsdp")
    zero = cells.whole("zero_stage")
    if zero is None:
        zero = 3 if (fsdp or 1) > 1 else source.zero
        if ranks > 1:
            cells.notes.append(f"zero_stage {zero} ({source.name}'s default)")
    if fsdp is None:
        fsdp = max(1, ranks) if zero >= 3 else 1
        if fsdp > 1:
            cells.notes.append(f"fsdp {fsdp} (ZeRO-3 over all data ranks)")
    return min(zero, 3), fsdp


def _sizes(cells: _Cells, source: Framework, tensor: int) -> Decoder:
    hidden = cells.whole("hidden") or 1
    model = cells.text("model").lower()
    heads = cells.or_else("heads", max(1, hidden // 128), "128 wide")
    kv_heads = cells.or_else("kv_heads", heads, "one for each head")
    if kv_heads < heads and not source.grouped:
        cells.notes.append(f"kv_heads {heads} ({source.name} shares none)")
        kv_heads = heads
    ffn = cells.whole("ffn")
    gated = any(word in model for word in GATED)
    if ffn is None:
        ffn = 4 * hidden
        gated = False
        cells.notes.append(f"ffn {ffn} (4 × hidden, no gate)")
    vocab = cells.or_else("vocab", 32000 if gated else 50304, "the usual")
    experts = cells.whole("experts") or 0
    fused = source.flash or any(
        word in cells.text(column).lower()
        for column, word in (("remat", "flash"), ("precision", "te "))
    )
    head_dim = max(1, hidden // heads)
    # Frameworks repeat shared heads and pad the vocabulary until ranks divide them.
    groups = max(kv_heads, tensor)
    return Decoder(
        layers=cells.whole("layers") or 1,
        hidden=hidden,
        heads=math.ceil(heads / groups) * groups,
        kv_heads=groups,
        head_dim=head_dim,
        ffn=ffn,
        vocab=_shared(vocab, tensor, source),
        seq=cells.whole("seq") or 1,
        gated=gated,
        experts=experts if experts > 1 else 0,
        topk=min(cells.whole("topk") or 1, experts) if experts > 1 else 0,
        flash=fused,
        eager=source.eager,
        fused_loss=source.fused_loss,
        dropout=source.dropout,
        norm_bias=not gated,
        positions=not gated,
        tied=not gated,
    )


def _shared(vocab: int, tensor: int, source: Framework) -> int:
    """The vocabulary as ranks share it."""
    if not source.pads_vocabulary:
        return max(1, vocab // tensor) * tensor
    return math.ceil(vocab / (128 * tensor)) * 128 * tensor


def _micro_batch(cells: _Cells, per_rank: int, stages: int, seq: int) -> int:
    given = cells.whole("micro_batch")
    if given is None:
        most = 1 if stages > 1 else max(1, LARGEST_TOKENS // seq)
        size = max(n for n in range(1, per_rank + 1) if per_rank % n == 0 and n <= most)
        why = "pipelines take small ones" if stages > 1 else "at most 16,384 tokens"
        cells.notes.append(f"micro_batch {size} ({why})")
        return size
    size = max(n for n in range(1, min(given, per_rank) + 1) if per_rank % n == 0)
    if size != given:
        cells.notes.append(
            f"micro_batch {size} (the row says {given}; a rank has {per_rank})"
        )
    return size


def _chunks(
    cells: _Cells, source: Framework, sizes: Decoder, stages: int, parts: int
) -> int:
    """Chunks of a stage; a schedule that interleaves takes rounds of the stages."""
    if stages == 1:
        return 1
    given = cells.whole("vpp")
    if given is not None:
        return given
    layers, over = divmod(sizes.layers, stages)
    chunks = 1
    if source.interleaves and not over and parts % stages == 0:
        chunks = max(n for n in range(1, layers + 1) if layers % n == 0 and n <= 8)
    cells.notes.append(f"vpp {chunks} ({source.name}'s habit)")
    return chunks


def _sequence_parallel(cells: _Cells, source: Framework, tensor: int) -> bool:
    text = cells.text("sp").lower()
    if text:
        return text not in ("none", "off", "0", "1", "false", "no")
    if tensor > 1:
        word = "on" if source.sequence_parallel else "off"
        cells.notes.append(f"sp {word} ({source.name}'s default)")
    return source.sequence_parallel and tensor > 1


WORDS = ("none", "full", "dots")
"""What a row says of rematerialization in our own words."""


def _remat(cells: _Cells, source: Framework, sizes: Decoder) -> Remat:
    text = cells.text("remat").lower()
    if text in WORDS:
        return text  # type: ignore[return-value]
    if text == source.selective:
        return source.selective
    if "selective" in text:
        cells.notes.append(f"remat {source.selective} (for {text!r})")
        return source.selective
    if text:
        cells.notes.append(f"remat dots (the nearest to {text!r})")
        return "dots"
    if source.remat is not None:
        cells.notes.append(f"remat {source.remat} ({source.name}'s default)")
        return source.remat
    return "none" if sizes.flash else "selective"


EIGHT = ("fp8", "f8", "float8", "e4m3", "e5m2", "int8")
"""Words of a precision in 8 bits."""


def _as_slowest(cells: _Cells, device: Entry, count: int) -> str:
    return (
        f"all {count} as {device.kind.display_name()}, the slowest of "
        f"{cells.text('device')}: whalejax plan weighs what each kind can do"
    )


def _precision(cells: _Cells, source: Framework, device: Entry) -> str:
    text = cells.text("precision").lower()
    if not text:
        cells.notes.append(f"precision {source.dtype} ({source.name}'s default)")
        return source.dtype
    if any(word in text for word in EIGHT):
        found = "f8"
    elif "bf16" in text or "bfloat16" in text:
        found = "bf16"
    elif "fp16" in text or "f16" in text or "half" in text:
        found = "f16"
    elif "32" in text:
        found = "tf32" if "tf32" in text else "f32"
    else:
        found = "bf16"
    if found not in (text, text.replace("fp", "f")):
        cells.notes.append(f"precision {found} (for {cells.text('precision')!r})")
    if found == "f8" and "f8" not in dict(device.kind.flops_per_second):
        cells.notes.append(f"{device.kind.display_name()} has no fp8: bf16's peak")
    return found


def _per_node(cells: _Cells, device: Entry, count: int) -> int:
    most = device.torus.max_chips if device.torus is not None else device.node_devices
    given = cells.whole("devices_per_node")
    if given is None:
        given = min(count, most)
        cells.notes.append(f"devices_per_node {given} (the catalogue's)")
    return min(given, count)


# Mixed pipelines.


_STAGES = re.compile(r"stages\s*(\[.*?\](?:\s*->\s*\[.*?\])*)", re.IGNORECASE)
_LAYERS = re.compile(r"profile-layers per stage\s*([\d|\s]+)", re.IGNORECASE)


def _unlike(cells: _Cells, sizes: Decoder) -> tuple[StageOf, ...]:
    """A mixed pipeline from ``notes``: stages of replicas, and layers of each."""
    text = cells.text("notes")
    found, counted = _STAGES.search(text), _LAYERS.search(text)
    if found is None or counted is None:
        return ()
    groups = re.findall(r"\[(.*?)\]", found[1])
    numbers = [int(n) for n in counted[1].split("|") if n.strip()]
    if len(numbers) != len(groups) or sum(numbers) != sizes.layers + 2:
        raise WhaleError(
            f"notes give {len(groups)} stages and layers {numbers}, in all "
            f"{sum(numbers)}; expected one number a stage and {sizes.layers} + 2 in all"
        )
    numbers[0] -= 1
    numbers[-1] -= 1
    return tuple(
        StageOf(replicas=tuple(map(_replica, group.split(","))), layers=layers)
        for group, layers in zip(groups, numbers, strict=True)
    )


def _replica(text: str) -> Replica:
    match = re.fullmatch(r"\s*(.+?)\s*x\s*TP\s*(\d+)\s*", text, re.IGNORECASE)
    if match is None:
        raise WhaleError(f"notes: {text.strip()!r} is no KINDxTPn")
    return Replica(device=read_device(match[1], guess=True).entry, tensor=int(match[2]))


# What was measured.


def measured_seconds(row: Mapping[str, str], run: Run) -> float | None:
    """Step time that a row states: itself, or from tokens, or from FLOP/s.

    FLOP/s are read in the convention of the framework.
    """
    cells = _Cells(row)

    def positive(column: str) -> float | None:
        text = cells.text(column)
        return float(text) if text and float(text) > 0 else None

    step = positive("step_time_s")
    if step is not None:
        return step
    tokens = positive("tokens_per_s_per_device")
    if tokens is not None:
        return run.tokens / (tokens * run.num_devices)
    rate = positive("tflops_per_device")
    return None if rate is None else run.model_flops() / (rate * 1e12 * run.num_devices)
