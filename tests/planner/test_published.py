"""Tables of runs: what a row means, what is inferred, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from whalejax.estimates.frameworks import framework
from whalejax.estimates.published_run import PublishedRun
from whalejax.estimates.read_table import (
    RowReading,
    measured_seconds,
    read_row,
    read_table,
)
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.formats.device_aliases import read_device


ROW = {
    "source": "nemo-test",
    "model": "gpt",
    "layers": "8",
    "hidden": "1024",
    "heads": "16",
    "seq": "2048",
    "vocab": "50000",
    "global_batch": "64",
    "device": "A100",
    "num_devices": "16",
    "devices_per_node": "8",
    "tp": "2",
    "pp": "2",
    "micro_batch": "2",
    "precision": "bf16",
    "remat": "full",
}


def read(**changes: str) -> PublishedRun:
    """The run of the row with changes."""
    found = read_row({**ROW, **changes}).run
    assert found is not None
    return found


def note(**changes: str) -> str:
    """What was inferred of the row with changes."""
    return "; ".join(read_row({**ROW, **changes}).notes)


def test_data_ranks_are_what_the_other_axes_leave() -> None:
    assert (read().data, read().num_micro_batches) == (4, 8)
    assert "dp 4 (num_devices over the other axes)" in note()


@pytest.mark.parametrize("column", ["layers", "hidden", "seq", "global_batch"])
def test_what_is_needed_leaves_the_prediction_empty(column: str) -> None:
    found = read_row({**ROW, column: ""})
    assert found == RowReading(run=None, notes=(f"no {column}: nothing predicted",))


def test_axes_that_do_not_divide_the_devices_are_said() -> None:
    found = read_row({**ROW, "tp": "3"})
    assert found.run is None
    assert "num_devices is 16; fsdp 1 × tp 3 × pp 2 × cp 1 = 6" in found.notes[0]


def test_llamas_have_gates_and_gpts_have_none() -> None:
    gpt, llama = read().sizes, read(model="Llama-2", ffn="2816").sizes
    assert (gpt.gated, gpt.tied, gpt.ffn) == (False, True, 4096)
    assert (llama.gated, llama.tied, llama.ffn) == (True, False, 2816)
    assert "ffn 4096 (4 × hidden, no gate)" in note()
    short = read(model="Llama-2", hidden="4096", heads="32").sizes
    assert (short.gated, short.ffn) == (True, 11008)
    assert "ffn 2816 (8/3 × hidden, rounded up to 256, with a gate)" in note(
        model="Llama-2"
    )


def test_narrow_networks_have_gates_whatever_the_name() -> None:
    """2.7 of the width is a Llama's; what parameters the row gives decides first."""
    assert read(ffn="2816").sizes.gated
    assert "feed-forward with a gate (ffn is 2.8 × hidden)" in note(ffn="2816")
    assert not read(ffn="4096").sizes.gated
    llama = dataclasses.replace(read(ffn="3072").sizes, vocab=50000)
    gpt = dataclasses.replace(
        llama, gated=False, norm_bias=True, positions=True, tied=True
    )
    for sizes in (gpt, llama):
        stated = f"{sizes.params / 1e9:.4f}"
        assert read(ffn="3072", params_b=stated).sizes.gated == sizes.gated


def test_no_attention_kernel_is_written_for_volta() -> None:
    assert read().sizes.flash
    assert not read(device="V100").sizes.flash
    assert read(device="V100", remat="flash").sizes.flash


@pytest.mark.parametrize(
    ("source", "place", "name"),
    [
        ("nemo-24.07", "", "Megatron-LM and NeMo"),
        ("jax-toolbox-maxtext", "", "MaxText"),
        ("azure megatron-deepspeed runs", "", "Megatron-DeepSpeed"),
        ("DeepSpeed blog", "microsoft/Megatron-LM", "DeepSpeed"),
        ("table 3", "pytorch/torchtitan:benchmarks/llama3.md", "TorchTitan"),
        ("alpaca", "", "an unnamed framework"),
        ("alpa-gpt", "", "Alpa"),
        ("LLM Foundry", "", "LLM Foundry"),
        ("hugging_face", "", "Hugging Face Transformers"),
        ("Megatron-LM (2021)", "", "Megatron-LM of 2021 and 2022"),
        ("Megatron-LM 0.11 (2025)", "", "Megatron-LM and NeMo"),
        ("mine", "", "an unnamed framework"),
    ],
)
def test_frameworks_are_found_by_words(source: str, place: str, name: str) -> None:
    assert framework(source, place).name == name
    run = read_row({**ROW, "source": source, "url_or_repo_path": place}).run
    assert run is not None
    assert run.framework.name == name


def test_a_framework_that_shares_no_keys_has_one_for_each_head() -> None:
    shared = {"model": "llama", "heads": "16", "kv_heads": "4"}
    assert read(**shared).sizes.kv_heads == 4
    assert read(**shared, source="sailor-x").sizes.kv_heads == 16
    assert "kv_heads 16 (Sailor shares none)" in note(**shared, source="sailor-x")


def test_the_vocabulary_is_padded_for_the_ranks_that_share_it() -> None:
    assert read().sizes.vocab == 50176
    assert read(tp="1").sizes.vocab == 50048
    bare = {"source": "vtrain", "vocab": "50257"}
    assert read(tp="1", **bare).sizes.vocab == 50257
    assert read(tp="2", **bare).sizes.vocab == 2 * 25128


def test_words_for_rematerialization_are_mapped_to_the_nearest() -> None:
    assert read(remat="selective_attn").remat == "selective"
    assert read(remat="selective op", source="torchtitan").remat == "alternate_dots"
    assert read(remat="minimal_offloaded", source="maxtext").remat == "dots"
    assert read(remat="minimal_offloaded", source="maxtext").offloaded
    assert read(remat="flash+dots_saveable").remat == "dots"
    assert read(remat="", source="vtrain").remat == "full"
    assert "remat full (Megatron-DeepSpeed's default)" in note(
        remat="", source="vtrain"
    )


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("TE BF16", "bf16"),
        ("amp_bf16", "bf16"),
        ("fp8 rowwise", "f8"),
        ("fp16", "f16"),
        ("tf32", "tf32"),
        ("float8", "f8"),
        ("float32", "f32"),
        ("float16", "f16"),
        ("mxfp8", "f8"),
        ("MXFP6", "f8"),
    ],
)
def test_words_for_precision_are_mapped(text: str, dtype: str) -> None:
    assert read(precision=text, device="H100").dtype == dtype
    noted = text not in ("fp16", "tf32")
    assert (f"precision {dtype} (for {text!r})" in note(precision=text)) == noted


@pytest.mark.parametrize("text", ["nvfp4", "MXFP4", "fp4"])
def test_four_bits_run_in_eight_where_there_are_no_units(text: str) -> None:
    assert read(precision=text, device="B200").dtype == "f4"
    assert read(precision=text, device="H100").dtype == "f8"
    assert "H100 has no fp4: fp8's peak" in note(precision=text, device="H100")


def test_micro_batches_are_inferred_small_in_pipelines() -> None:
    assert read(micro_batch="").micro_batch == 1
    assert read(micro_batch="", pp="1").micro_batch == 8
    assert "micro_batch 8 (at most 16,384 tokens)" in note(micro_batch="", pp="1")
    assert "micro_batch 4 (the row says 5; a rank has 16)" in note(micro_batch="5")


def test_fully_sharded_means_an_axis_of_its_own() -> None:
    found = read(source="llm-foundry", tp="1", pp="1")
    assert (found.zero, found.fsdp, found.data) == (3, 16, 1)
    hybrid = read(source="axlearn", tp="1", pp="1", fsdp="8", zero_stage="3")
    assert (hybrid.fsdp, hybrid.data) == (8, 2)


def test_a_rest_is_what_the_other_axes_leave() -> None:
    sharded = {"source": "maxtext", "tp": "1", "pp": "1", "zero_stage": ""}
    found = read(**sharded, fsdp="-1")
    assert (found.fsdp, found.data, found.zero) == (16, 1, 3)
    found = read(**sharded, fsdp="-1", dp="2")
    assert (found.fsdp, found.data) == (8, 2)
    assert "fsdp 8 (-1: what dp 2 leaves of 16)" in note(**sharded, fsdp="-1", dp="2")
    wrong = read_row({**ROW, **sharded, "fsdp": "-1", "dp": "3"})
    assert wrong.run is None
    assert "dp 3 does not divide 16 data ranks" in wrong.notes[0]
    assert read(**sharded, fsdp="8", dp="-1").data == 2


def test_samples_that_are_not_whole_are_those_of_each_device() -> None:
    halves = {"source": "maxtext", "pp": "1", "micro_batch": "0.5"}
    assert read(**halves, tp="2").micro_batch == 1
    assert "micro_batch 1 (0.5 for each of 2 devices)" in note(**halves, tp="2")
    # Without tensor ranks, those of a context share the sample.
    alone = read(**halves, tp="1", global_batch="8")
    assert (alone.context, alone.micro_batch, alone.global_batch) == (2, 1, 8)
    assert "cp 2 (a sample on 2 devices)" in note(**halves, tp="1")
    assert read(source="maxtext", pp="1", tp="2", micro_batch="1.5").micro_batch == 3


def test_modern_megatron_interleaves_and_shards_the_sequence() -> None:
    found = read()
    assert (found.chunks, found.sequence_parallel, found.zero) == (4, True, 1)
    old = read(source="megatron-lm-2020", vpp="1", sp="none")
    assert (old.chunks, old.sequence_parallel, old.zero) == (1, False, 0)


@pytest.mark.parametrize(
    ("text", "kind", "gib"),
    [
        ("A100-80GB-SXM", "a100-80", 80),
        ("a100_40gb", "a100-40", 40),
        ("A100", "a100-80", 80),
        ("DGX-H100", "h100", 80),
        ("TPU v5e", "v5e", 16),
        ("V100-32GB (DGX-2)", "v100-32", 32),
        ("GH-96", "gh200-96", 96),
        ("4xV100-16+4xT4", "t4", 16),
        ("H100 NVL 94GB", "h100-nvl", 94),
    ],
)
def test_devices_are_matched_by_family_and_memory(
    text: str, kind: str, gib: int
) -> None:
    found = read_device(text).entry.kind
    assert found.name == kind
    # Of a TPU's memory the compiler keeps some.
    assert gib * 2**30 * 0.97 < found.memory_bytes <= gib * 2**30


def test_cards_and_export_models_are_slower() -> None:
    whole, card = read_device("A100").entry, read_device("A100-PCIe-40GB")
    rates = [
        e.kind.matmul_flops_per_second("bf16", *[4096] * 3) for e in (whole, card.entry)
    ]
    assert rates[1] < rates[0]
    assert card.notes == (
        "A100-40 as a PCIe card",
        "300 of 400 W: products at 0.89 of their speed",
    )
    export = read_device("A800-80GB")
    assert export.notes == ("A800 is A100 with 400 GB/s of NVLink",)
    assert export.entry.node is not None
    assert export.entry.node.bandwidth_bytes_per_second == 200e9


def test_a_device_that_was_not_measured_is_its_generation_by_its_power() -> None:
    found = read_row({**ROW, "device": "NVIDIA L40S"})
    assert found.run is not None
    kind = found.run.device.kind
    assert (kind.peak_flops("bf16"), kind.memory_bytes) == (362e12, 48 * 2**30)
    (said,) = [n for n in found.notes if "was not measured" in n]
    assert re.fullmatch(
        r"L40S was not measured in bf16: the plan assumes [\d.]+ of 362 TFLOP/s "
        r"\([\d.]+ to [\d.]+\), as measured on l4, by its power",
        said,
    )
    assert "was not measured" not in note(device="A10G")


def test_devices_of_no_plug_in_are_taken_by_their_datasheet() -> None:
    assert read_device("Gaudi3").notes == (
        "Gaudi3 by its datasheet, as efficient as H100",
    )


@pytest.mark.parametrize(
    ("text", "tera", "gib"),
    [
        ("A30", 165, 24),
        ("RTX A6000", 154.8, 48),
        ("RTX 6000 Ada", 364, 48),
        ("MI300A", 980.6, 128),
        ("AMD MI300X", 1307.4, 192),
        ("H20-141GB", 148, 141),
        ("p4d.24xlarge", 312, 40),
        ("a2-megagpu-16g", 312, 40),
        ("a3-ultragpu-8g", 989.4, 141),
        ("A10G", 70, 24),
        ("B300", 2250, 288),
        ("RTX 5090", 209.5, 32),
        ("MI325X", 1307.4, 256),
        ("Gaudi2", 432, 96),
        ("TPU v3-512", 61.5, 16),
        ("v5p-128", 459, 95),
    ],
)
def test_names_are_read_as_words(text: str, tera: float, gib: int) -> None:
    kind = read_device(text).entry.kind
    assert kind.peak_flops("bf16") == pytest.approx(tera * 1e12)
    assert kind.memory_bytes / 2**30 == pytest.approx(gib, rel=0.08)


def test_a_card_has_slower_memory() -> None:
    assert read_device("H100-PCIe").entry.kind.memory_bytes_per_second == 2039e9
    kinds = {read_device(text).entry.kind.name for text in ("L40S", "A10", "RTX 3090")}
    assert len(kinds) == 3


def test_versions_of_other_machines_are_no_tpus() -> None:
    assert read_device("Standard_ND40rs_v2 (V100-32GB)").entry.kind.name == "v100-32"
    for name in ("TPU v3-8", "tpuv3", "v3-32", "tpu_v3"):
        assert read_device(name).entry.kind.platform == "tpu"


def test_an_unknown_device_is_said() -> None:
    found = read_row({**ROW, "device": "Cerebras WSE-3 96GB"})
    assert found.run is not None
    assert found.run.device.kind.memory_bytes == 96 * 2**30
    said = "device 'Cerebras WSE-3 96GB' is unknown: as a100-80"
    assert said in found.notes


def test_a_mixed_pipeline_stands_in_the_notes() -> None:
    text = (
        "stages [V100-16xTP2,V100-16xTP2] -> [T4xTP1,T4xTP1]; "
        "profile-layers per stage 7|3 (incl. embed and head layers)"
    )
    found = read(notes=text, tp="", pp="")
    assert [stage.layers for stage in found.unlike] == [6, 2]
    assert [r.device.kind.name for r in found.unlike[0].replicas] == ["v100-16"] * 2
    assert found.unlike[1].replicas[0].tensor == 1
    assert (found.stages, found.data) == (2, 2)
    wrong = read_row({**ROW, "notes": text.replace("7|3", "7|2")})
    assert "expected one number per stage and 8 + 2 in total" in wrong.notes[0]


def test_devices_of_several_kinds_are_priced_as_the_slowest() -> None:
    found = read_row({**ROW, "device": "v100-32+p100-16"})
    (note,) = [n for n in found.notes if "slowest" in n]
    assert note.startswith("all 16 as P100-16, the slowest of v100-32+p100-16: ")
    assert not any("slowest" in n for n in read_row({**ROW, "device": "p100"}).notes)


def test_times_are_read_from_tokens_and_flops_too() -> None:
    run = read()
    tokens = 64 * 2048
    assert measured_seconds({"step_time_s": "2.5"}, run) == 2.5
    found = measured_seconds({"tokens_per_s_per_device": "4096"}, run)
    assert found == tokens / (4096 * 16)
    counted = run.model_flops() / (100e12 * 16)
    assert measured_seconds({"tflops_per_device": "100"}, run) == counted
    assert measured_seconds({}, run) is None


def test_flops_follow_the_convention_of_the_framework() -> None:
    plain = read().model_flops()
    recomputed = read(source="megatron-lm-2020").model_flops()
    masked = read(source="maxtext", tp="1", pp="1").model_flops()
    assert masked < plain < recomputed < 4 / 3 * plain * 1.001


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "line 1: no column layers, hidden, seq, global_batch"),
        (
            "layers,hidden,seq,global_batch,num_devices,device\n1,2,3\n",
            "line 2: 3 cells, the header has 6",
        ),
        (
            "layers,hidden,seq,global_batch,num_devices,device\n8,x,1,1,1,T4\n",
            "line 2, column hidden: 'x' is not a number",
        ),
        (
            "layers,hidden,seq,global_batch,num_devices,device\n8,64,-1,1,1,T4\n",
            "line 2, column seq: -1; expected a whole number of at least 1",
        ),
        (
            "layers,hidden,seq,global_batch,num_devices,device\n8,64,1.5,1,1,T4\n",
            "line 2, column seq: 1.5; expected a whole number",
        ),
        (
            "layers,layers,hidden,seq,global_batch,num_devices,device\n",
            "the column 'layers' occurs twice",
        ),
    ],
)
def test_a_malformed_table_names_line_and_column(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(WhaleError, match=r"table\.csv") as error:
        read_table(path)
    assert message in str(error.value)


def test_no_table_is_said(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="cannot be read"):
        read_table(tmp_path / "none.csv")


def test_adapters_leave_the_parameters_frozen() -> None:
    assert not read().frozen
    assert read(model="llama2-7b LoRA").frozen
    assert "parameters frozen ('lora')" in note(model="llama2-7b LoRA")


def test_fewer_flops_than_training_means_frozen_parameters() -> None:
    """Six of each parameter and token are a training step's, four one of adapters."""
    sizes = read().sizes
    for each, frozen in ((6.0, False), (4.2, True)):
        rate = each * sizes.params * 1000 / 1e12
        cells = {"tflops_per_device": f"{rate}", "tokens_per_s_per_device": "1000"}
        assert read(**cells).frozen == frozen
    # One of the two says nothing about the other.
    assert not read(tflops_per_device="1").frozen


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        ("False", "none"),
        ("0", "none"),
        ("True", "full"),
        ("full_recompute", "full"),
        ("activation checkpointing", "full"),
        ("selective_attn", "selective"),
        ("minimal", "dots"),
        ("save_dot_except_mlpwi", "save_dot_except_mlpwi"),
        ("save_out_proj", "save_out_proj"),
    ],
)
def test_words_for_and_against_computing_again(words: str, policy: str) -> None:
    found = read_row({**ROW, "remat": words})
    assert found.run is not None
    assert found.run.remat == policy
    assert not found.unknown_policy
    assert found.policies == (policy,)


@pytest.mark.parametrize(
    "words", ["save_my_dots", "minimal_and_more", "dots but mlp", "selective 2"]
)
def test_an_unknown_policy_is_said_with_those_that_are_known(words: str) -> None:
    found = read_row({**ROW, "remat": words, "source": "torchtitan"})
    assert found.run is not None and found.unknown_policy and not found.confirmed
    assert found.policies == ("dots", "full")
    (said,) = [note for note in found.notes if note.startswith("remat dots")]
    assert said.startswith(f"remat dots (column remat: '{words}' is unknown, and its")
    assert "known are none, selective, full, " in said
    assert "save_dot_except_mlpwi" in said and "minimal" in said


def test_heads_are_padded_until_tensor_ranks_divide_them() -> None:
    sizes = read(heads="25", hidden="1600", tp="2").sizes
    assert (sizes.heads, sizes.kv_heads, sizes.head_dim) == (26, 26, 64)
    assert "heads 26 (tp 2 does not divide 25)" in note(
        heads="25", hidden="1600", tp="2"
    )
    shared = read(model="llama", heads="64", kv_heads="8", tp="16", pp="1").sizes
    assert (shared.heads, shared.kv_heads) == (64, 16)


def test_a_number_of_sequence_ranks_without_tensor_ranks_is_context() -> None:
    found = read(sp="8", tp="1", pp="1")
    assert (found.context, found.data, found.sequence_parallel) == (8, 2, False)
    assert "cp 8 (sp 8 without tp)" in note(sp="8", tp="1", pp="1")
    assert read(sp="8").sequence_parallel
    assert not read(sp="1.0").sequence_parallel
    assert not read(sp="-").sequence_parallel
    assert read(sp="inf", tp="1").context == 1


def test_expert_ranks_are_what_experts_and_ranks_divide_by() -> None:
    mixture = {"experts": "8", "topk": "2", "pp": "1", "tp": "1"}
    assert read(**mixture, ep="4").expert == 4
    assert read(**mixture, ep="16").expert == 8
    assert "ep 8 (the row says 16, of 8 experts and 16 ranks)" in note(
        **mixture, ep="16"
    )


def test_adapters_are_words() -> None:
    assert read(model="llama2_70b_lora").frozen
    assert not read(url_or_repo_path="models/exploration/README.md").frozen
    assert not read(notes="InfiniBand HDR adapters").frozen


def test_chips_of_a_tpu_host_are_no_slice() -> None:
    pod = {"device": "TPU v5p", "num_devices": "256", "pp": "1", "tp": "1"}
    assert read(**pod, global_batch="256", devices_per_node="4").devices_per_node == 256
    assert read(**pod, global_batch="256", devices_per_node="64").devices_per_node == 64


def test_a_batch_is_rounded_rather_than_a_micro_batch_cut_small() -> None:
    found = read(micro_batch="4", global_batch="28", pp="1", tp="4")
    assert (found.micro_batch, found.num_micro_batches) == (4, 2)
    assert "global_batch rounded up (7 of a rank, in micro-batches of 4)" in note(
        micro_batch="4", global_batch="28", pp="1", tp="4"
    )


def test_the_ends_of_a_model_count_as_layers_of_an_interleaved_pipeline() -> None:
    deep = {"layers": "126", "pp": "16", "tp": "1", "global_batch": "32"}
    assert read(**deep, micro_batch="1", num_devices="16").chunks == 8


def test_launched_pipelines_keep_their_parameters() -> None:
    assert read(source="deepspeed").zero == 1
    assert read(source="deepspeed", pp="1", tp="1").zero == 3


def test_a_head_may_have_a_width_of_its_own() -> None:
    assert read(head_dim="128").sizes.head_dim == 128
    assert read().sizes.head_dim == 64


def test_more_stages_than_layers_are_said() -> None:
    found = read_row({**ROW, "pp": "16", "tp": "1"})
    assert found.run is None
    assert found.notes[0] == "pp 16 of 8 layers: nothing predicted"


def test_heads_that_keys_do_not_divide_are_said() -> None:
    shared = {"model": "llama", "heads": "16", "kv_heads": "5", "tp": "1", "pp": "1"}
    assert read(**shared).sizes.heads == 20
    assert "heads 20 (kv_heads 5 does not divide 16)" in note(**shared)


def test_a_sequence_is_padded_for_the_ranks_that_share_it() -> None:
    long = {"seq": "2049", "cp": "4", "tp": "2", "pp": "1"}
    assert read(**long).sizes.seq == 2052
    assert "seq 2052 (cp 4 does not divide 2049)" in note(**long)


def test_what_is_not_as_the_row_says_is_said() -> None:
    assert "zero_stage 3 (the row says 7)" in note(zero_stage="7", pp="1")
    assert "topk 8 (the row says 9)" in note(experts="8", topk="9")
    assert "topk 1 (none given)" in note(experts="8")
    assert "topk 1 (the row says 0)" in note(experts="8", topk="0")
    assert "ep 1 (none given)" in note(experts="8")
    assert "sp on (for 'maybe')" in note(sp="maybe")
    for device, dtype in (("V100-32GB", "bf16"), ("P40", "fp16")):
        said = note(device=device, precision=dtype)
        assert f"has no fast {dtype.replace('fp', 'f')}: products run in f32" in said
    assert read(device="V100-32GB", precision="").dtype == "f16"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RTX4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("A10080GB", "a100-80"),
        ("GB200", "gb200"),
        ("GB200 NVL36", "gb200-nvl36"),
        ("V100-PCIe-16GB", "v100-pcie"),
        ("H100-NVL", "h100-nvl"),
        ("DGX-H100", "h100"),
    ],
)
def test_names_without_blanks(text: str, kind: str) -> None:
    assert read_device(text).entry.kind.name == kind


def test_what_only_looks_like_a_name_is_none() -> None:
    with pytest.raises(WhaleError, match="'A1000' names no family"):
        read_device("A1000")
    assert read_device("Foo9", guess=True).notes == (
        "device 'Foo9' is unknown: as a100-80",
    )


UNLIKE = "stages [V100-16xTP2] -> [T4xTP1]; profile-layers per stage 6|4"


def test_unlike_stages_have_the_devices_that_they_name() -> None:
    found = read_row({**ROW, "notes": UNLIKE, "num_devices": "2", "tp": "1"})
    assert found.run is not None
    assert (found.run.num_devices, found.run.chunks) == (3, 1)
    assert "num_devices 3 (of the stages; the row says 2)" in found.notes
    vpp = note(notes=UNLIKE, vpp="2")
    assert "vpp 1 (the row says 2; mixed stages have one part)" in vpp
    wrong = read_row({**ROW, "notes": UNLIKE.replace("TP1", "TP0")})
    assert wrong.run is None and "'T4xTP0' is not KINDxTPn" in wrong.notes[0]
    unknown = note(notes=UNLIKE.replace("T4", "Foo9"))
    assert "device 'Foo9' is unknown: as a100-80" in unknown


def test_unlike_stages_hold_their_parameters_whole() -> None:
    given = {"notes": UNLIKE, "fsdp": "4", "zero_stage": "3", "cp": "2"}
    found = read_row({**ROW, **given})
    assert found.run is not None
    run = found.run
    assert (run.fsdp, run.zero, run.context, run.data) == (1, 1, 1, 1)
    for words in (
        "fsdp 1 (the row says 4",
        "zero_stage 1 (the row says 3",
        "cp 1 (the",
    ):
        assert any(one.startswith(words) for one in found.notes)
    given = {"notes": UNLIKE, "source": "torchtitan", "zero_stage": "", "fsdp": ""}
    usual = read_row({**ROW, **given})
    assert usual.run is not None and (usual.run.fsdp, usual.run.zero) == (1, 1)
    assert "zero_stage 1 (TorchTitan's default)" in usual.notes


def test_a_step_is_compiled_as_the_framework_does_unless_the_row_says() -> None:
    titan = read(source="torchtitan").framework
    assert (titan.compiled, titan.eager, titan.fused_loss) == (True, False, True)
    assert "compile compiled (TorchTitan's default)" in note(source="torchtitan")
    run = read(source="torchtitan", compile="eager", model="llama")
    launched = run.framework
    assert (launched.compiled, launched.eager) == (False, True)
    assert (run.sizes.eager, run.sizes.fused_loss) == (True, False)
    assert "compile eager (Megatron-LM and NeMo's default)" in note()
    assert not read().sizes.eager
    fused = read(source="hf", compile="torch.compile").framework
    assert (fused.compiled, fused.eager, fused.fused_loss) == (True, False, True)
    assert "compile" not in note(source="maxtext", tp="1", pp="1")


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            {"compile": "eager", "source": "maxtext"},
            "column compile: 'eager'; MaxText compiles every step. Leave the",
        ),
        ({"compile": "maybe"}, "column compile: 'maybe'; expected compiled or eager"),
        (
            {"loss_chunks": "5000"},
            "column loss_chunks: 5000; a device has 4096 tokens of a micro-batch. Give",
        ),
    ],
)
def test_what_no_run_can_be_is_refused(cells: dict[str, str], words: str) -> None:
    found = read_row({**ROW, **cells})
    assert found.run is None
    assert found.notes[0].startswith(words)


def test_loss_chunks_are_one_where_the_row_says_none() -> None:
    assert read().loss_chunks == 1
    assert read(loss_chunks="8").loss_chunks == 8
