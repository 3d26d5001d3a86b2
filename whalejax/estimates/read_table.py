"""Interprets rows of a table of training runs as runs that can be estimated.

A row has an architecture, a device, a layout and measurements. The rules below fill
missing values, and every applied rule is noted in the row.

The module is long because it has all of these rules, next to the columns that they
fill.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from whalejax.estimates import vocabulary
from whalejax.estimates.csv_table import COLUMNS as COLUMNS
from whalejax.estimates.csv_table import NEEDED, Cells
from whalejax.estimates.csv_table import CsvTable as CsvTable
from whalejax.estimates.csv_table import read_table as read_table
from whalejax.estimates.decoder import UNCONFIRMED, DecoderSizes, Remat
from whalejax.estimates.frameworks import Framework, framework, with_compilation
from whalejax.estimates.published_run import (
    PublishedRun,
    StageSpec,
    devices_of,
    notes_of,
    stages_of,
)
from whalejax.meshes.catalogue import CatalogueEntry, efficiency_notes
from whalejax.meshes.device_kinds import VOLTA
from whalejax.meshes.errors import WhaleError, quoted
from whalejax.meshes.formats.device_aliases import AliasedDevice, read_device
from whalejax.planner.sharding.layout import largest_divisor


NARROW = 4
"""Ratio of width to hidden size below which a feed-forward has a gate."""

NEAR = 0.05
"""Largest difference of a row's parameters from those of its sizes, as a fraction."""

MOST_ROWS = 10**6
"""Largest number of rows of a pipeline's schedule; published ones have up to 10,000."""

LARGEST_TOKENS = 16384
"""Largest number of tokens of an inferred micro-batch without a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReading:
    """Interpretation of a row.

    Attributes:
        run: Described run; None if a required value is missing.
        notes: Notes on inferred or replaced values, or the reason why there is no run.
        policies: Possible remat policies, the likeliest first. There are several if
            neither the row nor the framework names one, or the row's name is unknown.
        unknown_policy: Whether the row's name for its remat policy is unknown.
        unknown_memory: Whether the memory of the row's device is unknown.
        open_micro_batch, open_zero: Whether the row omits the micro-batch, or the ZeRO
            stage.
        taken: Whether the row counts as fitting although its estimate is slightly too
            large.
    """

    run: PublishedRun | None
    notes: tuple[str, ...]
    policies: tuple[Remat, ...] = ()
    open_micro_batch: bool = False
    open_zero: bool = False
    taken: bool = False
    unknown_policy: bool = False
    unknown_memory: bool = False

    @property
    def confirmed(self) -> bool:
        """Whether measured runs confirmed the memory model for policy and device."""
        guessed = self.unknown_policy or self.unknown_memory
        return self.run is None or not (guessed or self.run.remat in UNCONFIRMED)


def read_row(row: Mapping[str, str]) -> RowReading:
    """Returns the run of a row, with its inferred values.

    Args:
        row: Cell by name of the column, from ``csv_table.read_table``.
    """
    cells = Cells(row)
    missing = [name for name in NEEDED if cells.whole(name) is None]
    if missing:
        return RowReading(
            run=None, notes=(f"no {', '.join(missing)}: nothing predicted",)
        )
    try:
        run, unknown = _run(cells)
    except WhaleError as error:
        return RowReading(run=None, notes=(str(error), *cells.notes))
    policies: tuple[Remat, ...] = (run.remat,)
    if not cells.text("remat") and run.framework.remat is None:
        policies = ("none", "selective", "full")
    elif unknown and not run.offloaded:
        # A policy of an unknown name saves something, at most what fits.
        policies = ("dots", "full")
    return RowReading(
        run=run,
        notes=tuple(cells.notes),
        policies=policies,
        open_micro_batch=cells.whole("micro_batch") is None,
        open_zero=cells.whole("zero_stage") is None and cells.whole("fsdp") is None,
        unknown_policy=unknown,
        unknown_memory=not read_device(cells.text("device"), guess=True).knows_memory,
    )


def _run(cells: Cells) -> tuple[PublishedRun, bool]:
    source = framework(cells.text("source"), cells.text("url_or_repo_path"))
    device = read_device(cells.text("device"), guess=True)
    cells.notes += device.notes
    count = cells.whole("num_devices") or 1
    unlike = stages_of(cells.text("notes"), cells.whole("layers") or 1)
    _note_mix(cells, device, unlike, count)
    if unlike:
        count, stages, context = devices_of(unlike), len(unlike), 1
        ranks, tensor = len(unlike[0].replicas), unlike[0].replicas[0].tensor
        zero, fsdp = _whole_stages(cells, source)
        data = ranks
    else:
        tensor = cells.or_else("tp", 1, "none given")
        stages = _stages(cells)
        context = _context(cells, tensor)
        ranks = count // (tensor * stages * context)
        zero, fsdp = _sharding(cells, source, ranks, stages)
        data = _data(cells, count, fsdp, tensor, stages, context)
    source = _with_compilation(cells, source)
    sizes = _sizes(cells, source, tensor, context, device.entry)
    per_rank, over = divmod(cells.whole("global_batch") or 1, data * fsdp)
    if over or not per_rank:
        cells.notes.append(
            f"global_batch {cells.text('global_batch')} does not divide by "
            f"{data * fsdp} data ranks: rounded up"
        )
        per_rank += 1
    micro = _micro_batch(cells, per_rank, stages, sizes.seq, tensor * context)
    per_rank = math.ceil(per_rank / micro) * micro
    remat, unknown = _remat(cells, source, sizes)
    result = PublishedRun(
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
        expert=_expert(cells, sizes, ranks * context),
        chunks=_chunks(cells, source, sizes, stages, per_rank // micro, bool(unlike)),
        zero=zero,
        sequence_parallel=_sequence_parallel(cells, source, tensor),
        micro_batch=micro,
        global_batch=per_rank * data * fsdp,
        remat=remat,
        dtype=_precision(cells, source, device.entry),
        unlike=unlike,
        offloaded="offload" in cells.text("remat").lower(),
        frozen=_frozen(cells, sizes),
        autocast=vocabulary.has(cells.text("precision").lower(), "autocast"),
        loss_chunks=_loss_chunks(cells, micro * sizes.seq // context),
    )
    cells.notes += efficiency_notes([device.entry.kind], result.multiplied)
    return result, unknown


def _with_compilation(cells: Cells, source: Framework) -> Framework:
    text = cells.text("compile")
    if not text:
        if not source.xla:
            word = "compiled" if source.compiled else "eager"
            cells.notes.append(f"compile {word} ({source.name}'s default)")
        return with_compilation(source, source.compiled)
    compiled = vocabulary.compiled(text)
    if compiled is None:
        raise WhaleError(
            f"column compile: {quoted(text)}; expected compiled or eager, or nothing"
        )
    if source.xla and not compiled:
        raise WhaleError(
            f"column compile: {quoted(text)}; {source.name} compiles every step. Leave "
            "the cell empty: nothing predicted"
        )
    return with_compilation(source, compiled)


def _loss_chunks(cells: Cells, tokens: int) -> int:
    """Returns the number of chunks in which a device computes logits."""
    given = cells.whole("loss_chunks") or 1
    if given > tokens:
        raise WhaleError(
            f"column loss_chunks: {given}; a device has {tokens} tokens of a "
            "micro-batch. Give at most as many: nothing predicted"
        )
    return given


def _data(
    cells: Cells, count: int, fsdp: int, tensor: int, stages: int, context: int
) -> int:
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
    return data


def _padded(cells: Cells, seq: int, context: int) -> int:
    result = math.ceil(seq / context) * context
    if result != seq:
        cells.notes.append(f"seq {result} (cp {context} does not divide {seq})")
    return result


def _stages(cells: Cells) -> int:
    stages, layers = cells.or_else("pp", 1, "none given"), cells.whole("layers") or 1
    chunks = cells.whole("vpp") or 1
    if 3 * stages * stages * chunks > MOST_ROWS:
        raise WhaleError(
            f"pp {stages} and vpp {chunks} make a schedule of too many rows: nothing "
            "predicted"
        )
    if stages > layers:
        raise WhaleError(f"pp {stages} of {layers} layers: nothing predicted")
    return stages


def _topk(cells: Cells, experts: int) -> int:
    given = cells.or_else("topk", 1, "none given")
    topk = max(1, min(given, experts))
    if topk != given:
        cells.notes.append(f"topk {topk} (the row says {given})")
    return topk


def _expert(cells: Cells, sizes: DecoderSizes, ranks: int) -> int:
    if not sizes.experts:
        return 1
    given = cells.or_else("ep", 1, "none given")
    expert = math.gcd(math.gcd(given, sizes.experts), ranks)
    if expert != given:
        cells.notes.append(
            f"ep {expert} (the row says {given}, of {sizes.experts} experts and "
            f"{ranks} "
            "ranks)"
        )
    return expert


def _frozen(cells: Cells, sizes: DecoderSizes) -> bool:
    """Returns whether only adapters are trained.

    A row says so, or counts fewer FLOPs than six per parameter and token (one forward
    and two backward products).
    """
    text = " ".join(cells.text(name) for name in ("model", "url_or_repo_path", "notes"))
    said = [word for word in vocabulary.ADAPTERS if vocabulary.has(text.lower(), word)]
    if said:
        cells.notes.append(f"parameters frozen ({said[0]!r}); adapters are not priced")
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
"""Fraction of a training step's products below which parameters are not trained."""


def _whole_stages(cells: Cells, source: Framework) -> tuple[int, int]:
    """Returns ZeRO stage and ``fsdp`` of mixed stages, which shard nothing."""
    for column in ("fsdp", "zero_stage", "cp"):
        given = cells.whole(column) or 1
        if given > 1:
            why = f"the row says {given}; unlike stages are not sharded so"
            cells.notes.append(f"{column} 1 ({why})")
    zero = cells.whole("zero_stage")
    if zero is None:
        zero = min(1, source.zero)
        cells.notes.append(f"zero_stage {zero} ({source.name}'s default)")
    return min(1, zero), 1


def _sharding(
    cells: Cells, source: Framework, ranks: int, stages: int
) -> tuple[int, int]:
    fsdp = _rest_of(cells, ranks)
    zero = cells.whole("zero_stage")
    if zero is None:
        usual = source.zero
        if stages > 1 and not source.compiled:
            usual = min(usual, 1)  # Launched stages do not shard parameters.
        zero = 3 if (fsdp or 1) > 1 else usual
        if ranks > 1:
            cells.notes.append(f"zero_stage {zero} ({source.name}'s default)")
    if fsdp is None:
        fsdp = max(1, ranks) if zero >= 3 else 1
        if fsdp > 1:
            cells.notes.append(f"fsdp {fsdp} (ZeRO-3 over all data ranks)")
    if zero > MOST_ZERO:
        cells.notes.append(f"zero_stage {MOST_ZERO} (the row says {zero})")
    return min(zero, MOST_ZERO), fsdp


def _rest_of(cells: Cells, ranks: int) -> int | None:
    """Returns the size of ``fsdp`` if -1 means the ranks that ``dp`` leaves."""
    if cells.number("fsdp") != -1:
        return cells.whole("fsdp")
    data = cells.whole("dp") or 1
    if ranks % data:
        raise WhaleError(
            f"fsdp -1: dp {data} does not divide {ranks} data ranks: nothing predicted"
        )
    cells.notes.append(f"fsdp {ranks // data} (-1: what dp {data} leaves of {ranks})")
    return max(1, ranks // data)


def _sizes(
    cells: Cells, source: Framework, tensor: int, context: int, device: CatalogueEntry
) -> DecoderSizes:
    hidden = cells.whole("hidden") or 1
    heads = cells.or_else("heads", max(1, hidden // 128), "128 wide")
    kv_heads = cells.or_else("kv_heads", heads, "one for each head")
    if kv_heads < heads and not source.grouped:
        cells.notes.append(f"kv_heads {heads} ({source.name} shares none)")
        kv_heads = heads
    experts = cells.whole("experts") or 0
    said = any(
        word in cells.text(column).lower()
        for column, word in (("remat", "flash"), ("precision", "te "))
    )
    newer = source.flash_anywhere or device.kind.attention_generation > VOLTA
    # Frameworks repeat shared heads, and pad the vocabulary until ranks divide it.
    groups = math.ceil(max(kv_heads, tensor) / tensor) * tensor
    padded = math.ceil(heads / groups) * groups
    if padded != heads:
        by = f"tp {tensor}" if kv_heads == heads else f"kv_heads {groups}"
        cells.notes.append(f"heads {padded} ({by} does not divide {heads})")
    gated_name = any(word in cells.text("model").lower() for word in vocabulary.GATED)
    plain = DecoderSizes(
        layers=cells.whole("layers") or 1,
        hidden=hidden,
        heads=padded,
        kv_heads=groups,
        head_dim=cells.whole("head_dim") or max(1, hidden // heads),
        ffn=cells.whole("ffn") or _usual_width(hidden, gated=gated_name),
        vocab=cells.whole("vocab") or 1,
        seq=_padded(cells, cells.whole("seq") or 1, context),
        experts=experts if experts > 1 else 0,
        topk=_topk(cells, experts) if experts > 1 else 0,
        flash=said or (source.flash and newer),
        eager=source.eager,
        fused_loss=source.fused_loss,
        dropout=source.dropout,
    )
    llama = replace(plain, gated=True, norm_bias=False, positions=False, tied=False)
    llama = replace(llama, dropout=False)
    gated = _gated(cells, plain, llama, by_name=gated_name)
    sizes = llama if gated else plain
    if not (source.flash_plain or sizes.gated or said):
        sizes = replace(sizes, flash=False)
    vocab = cells.or_else("vocab", 32000 if sizes.gated else 50304, "the usual")
    return replace(sizes, vocab=_sharded_vocabulary(vocab, tensor, source))


def _usual_width(hidden: int, *, gated: bool) -> int:
    """Returns the width of a feed-forward if its row has none.

    Llama's three matrices have 8/3 of the hidden size, rounded up to 256. So they have
    as many parameters as two matrices of four times it (Touvron et al. 2023, section
    2.2).
    """
    return 256 * math.ceil(8 * hidden / 3 / 256) if gated else 4 * hidden


def _gated(
    cells: Cells, plain: DecoderSizes, llama: DecoderSizes, *, by_name: bool
) -> bool:
    if cells.whole("ffn") is None:
        how = (
            "8/3 × hidden, rounded up to 256, with a gate"
            if by_name
            else "4 × hidden, no gate"
        )
        cells.notes.append(f"ffn {plain.ffn} ({how})")
        return by_name
    if by_name:
        return True
    stated = float(cells.text("params_b") or 0) * 1e9
    if stated and cells.whole("vocab"):
        errors = [abs(one.params / stated - 1.0) for one in (plain, llama)]
        if min(errors) < NEAR < max(errors):
            gated = errors[1] < errors[0]
            if gated:
                cells.notes.append("feed-forward with a gate (by params_b)")
            return gated
    if plain.ffn < NARROW * plain.hidden:
        share = plain.ffn / plain.hidden
        cells.notes.append(f"feed-forward with a gate (ffn is {share:.2g} × hidden)")
        return True
    return False


def _sharded_vocabulary(vocab: int, tensor: int, source: Framework) -> int:
    """Returns the vocabulary size over all ranks: padded, or without a remainder."""
    if not source.pads_vocabulary:
        return max(1, vocab // tensor) * tensor
    return math.ceil(vocab / (128 * tensor)) * 128 * tensor


def _micro_batch(
    cells: Cells, per_rank: int, stages: int, seq: int, together: int
) -> int:
    """Returns the samples per rank. A fraction in the row is per device.

    ``per_rank`` is the number of samples of a rank in a step. ``together`` is the
    number of devices of a stage that share a sample.
    """
    given = cells.whole("micro_batch")
    stated = cells.number("micro_batch") or 1.0
    if stated != int(stated):
        given = max(1, math.ceil(stated * together - 1e-9))
        cells.notes.append(
            f"micro_batch {given} ({stated:g} for each of {together} devices)"
        )
    if given is None:
        most = 1 if stages > 1 else max(1, LARGEST_TOKENS // seq)
        size = largest_divisor(per_rank, most)
        why = "pipelines take small ones" if stages > 1 else "at most 16,384 tokens"
        cells.notes.append(f"micro_batch {size} ({why})")
        return size
    size = largest_divisor(per_rank, given)
    if size < ROUND * given <= ROUND * per_rank:
        cells.notes.append(
            f"global_batch rounded up ({per_rank} of a rank, in micro-batches of "
            f"{given})"
        )
        return given
    if size != given:
        cells.notes.append(
            f"micro_batch {size} (the row says {given}; a rank has {per_rank})"
        )
    return size


MOST_ZERO = 3

ROUND = 0.75
"""Smallest divisor that replaces an indivisible micro-batch, as a fraction of it."""


def _chunks(
    cells: Cells,
    source: Framework,
    sizes: DecoderSizes,
    stages: int,
    parts: int,
    unlike: bool,
) -> int:
    """Returns the chunks per stage; interleaving needs multiples of the stages."""
    given = cells.whole("vpp")
    if unlike and (given or 1) > 1:
        cells.notes.append(f"vpp 1 (the row says {given}; mixed stages have one part)")
    if stages == 1 or unlike:
        return 1
    if given is not None:
        most = math.ceil((sizes.layers + 2) / stages)
        if given > most:
            cells.notes.append(
                f"vpp {most} (the row says {given}; a stage has no more)"
            )
        return min(given, most)
    # If layers do not divide, the embedding and the head count as layers.
    places = sizes.layers if sizes.layers % stages == 0 else sizes.layers + 2
    layers, over = divmod(places, stages)
    chunks = 1
    if source.interleaves and not over and parts % stages == 0:
        chunks = largest_divisor(layers, 8)
    cells.notes.append(f"vpp {chunks} ({source.name}'s habit)")
    return chunks


def _sequence_parallel(cells: Cells, source: Framework, tensor: int) -> bool:
    text = cells.text("sp")
    if text:
        if tensor > 1 and not vocabulary.is_bool_or_number(text):
            cells.notes.append(f"sp on (for {text!r})")
        return tensor > 1 and vocabulary.yes(text)
    if tensor > 1:
        word = "on" if source.sequence_parallel else "off"
        cells.notes.append(f"sp {word} ({source.name}'s default)")
    return source.sequence_parallel and tensor > 1


def _context(cells: Cells, tensor: int) -> int:
    """Returns the number of ranks that share a sequence, even without tensor ranks."""
    each = cells.number("micro_batch") or 1.0
    if cells.whole("cp") is None and each * tensor < 1:
        context = max(1, round(1 / (each * tensor)))
        cells.notes.append(f"cp {context} (a sample on {1 / each:g} devices)")
        return context
    degree = vocabulary.degree(cells.text("sp"))
    if cells.whole("cp") is None and tensor == 1 and degree > 1:
        cells.notes.append(f"cp {degree} (sp {cells.text('sp')} without tp)")
        return degree
    return cells.or_else("cp", 1, "none given")


def _remat(cells: Cells, source: Framework, sizes: DecoderSizes) -> tuple[Remat, bool]:
    text = cells.text("remat").lower()
    if not text:
        if source.remat is None:
            return ("none" if sizes.flash else "selective"), False
        cells.notes.append(f"remat {source.remat} ({source.name}'s default)")
        return source.remat, False
    remat = vocabulary.remat(text, source.selective)
    policy: Remat = remat or "dots"
    if remat is None:
        known = ", ".join(vocabulary.KNOWN_REMATS)
        cells.notes.append(
            f"remat dots (column remat: {quoted(text)} is unknown, and its memory with "
            f"it; known are {known})"
        )
    elif text not in (policy, source.selective):
        cells.notes.append(f"remat {policy} (for {text!r})")
    return policy, remat is None


def _precision(cells: Cells, source: Framework, device: CatalogueEntry) -> str:
    text, name = cells.text("precision").lower(), device.kind.display_name()
    rates = dict(device.kind.flops_per_second)
    precision = vocabulary.precision(text) if text else source.dtype
    if not text and precision == "bf16" and device.kind.widens_bfloat16:
        # Training in 16 bits on a device without bfloat16 uses float16.
        precision = "f16" if "f16" in rates else precision
    if not text:
        cells.notes.append(f"precision {precision} ({source.name}'s default)")
    elif precision not in (text, text.replace("fp", "f")):
        cells.notes.append(f"precision {precision} (for {cells.text('precision')!r})")
    for narrow, wider in (("f4", "f8"), ("f8", "bf16")):
        if precision == narrow and narrow not in rates:
            shown = {"f4": "fp4", "f8": "fp8", "bf16": "bf16"}
            cells.notes.append(f"{name} has no {shown[narrow]}: {shown[wider]}'s peak")
            precision = wider
    runs_in = device.kind.multiplies_in(precision, exact=True)
    if runs_in != precision:
        cells.notes.append(f"{name} has no fast {precision}: products run in {runs_in}")
    return precision


def _note_mix(
    cells: Cells, device: AliasedDevice, unlike: tuple[StageSpec, ...], count: int
) -> None:
    """Replaces mixed devices without stages in the row by the slowest kind."""
    cells.notes += notes_of(cells.text("notes"), unlike, count)
    if device.others and not unlike:
        cells.notes.append(
            f"all {count} as {device.entry.kind.display_name()}, the slowest of "
            f"{cells.text('device')}: whalejax plan weighs what each kind can do"
        )


HOST = 8  # Chips per host of a TPU; a larger slice has several hosts.


def _per_node(cells: Cells, device: CatalogueEntry, count: int) -> int:
    most = max(device.node_devices, device.domain_devices)
    if device.torus is not None:
        most = device.torus.max_chips
    given = cells.whole("devices_per_node")
    if device.torus is not None and given is not None and given <= HOST < count:
        cells.notes.append(f"devices_per_node {given} is a host's: one slice")
        given = min(count, most)
    if given is None:
        given = min(count, most)
        cells.notes.append(f"devices_per_node {given} (the catalogue's)")
    return min(given, count)


def measured_seconds(row: Mapping[str, str], run: PublishedRun) -> float | None:
    """Returns a row's step time: as stated, or from tokens or FLOP/s; None without any.

    FLOP/s are counted as the framework does.
    """
    cells = Cells(row)

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
