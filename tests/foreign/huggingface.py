"""Hugging Face's Flax models, from configurations, with random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers as hf

from tests.foreign.harness import Built, foreign, images, tokens


VOCABULARY = 96
LENGTH = 16
SAMPLES = 8


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def _causal(model: Any, **words: Any) -> Built:
    ids = tokens(SAMPLES, LENGTH, VOCABULARY)
    words = words or {"train": False}

    def loss_fn(params: Any, ids: Any) -> jax.Array:
        logits = model(ids, params=params, **words).logits
        return _cross_entropy(logits[:, :-1], ids[:, 1:])

    return Built(loss_fn=loss_fn, model=model.params, batch=ids)


def _masked(model: Any) -> Built:
    ids = tokens(SAMPLES, LENGTH, VOCABULARY)
    batch = {"ids": ids, "mask": (ids % 7 > 0).astype(jnp.int32)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        out = model(
            batch["ids"], attention_mask=batch["mask"], params=params, train=False
        )
        return _cross_entropy(out.logits, batch["ids"])

    return Built(loss_fn=loss_fn, model=model.params, batch=batch)


def _translating(model: Any) -> Built:
    batch = {
        "inputs": tokens(SAMPLES, LENGTH, VOCABULARY),
        "targets": tokens(SAMPLES, LENGTH, VOCABULARY, seed=4),
    }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        shifted = jnp.roll(batch["targets"], 1, axis=1).at[:, 0].set(0)
        logits = model(
            batch["inputs"], decoder_input_ids=shifted, params=params, train=False
        ).logits
        return _cross_entropy(logits, batch["targets"])

    return Built(loss_fn=loss_fn, model=model.params, batch=batch)


def _seeing(model: Any, side: int) -> Built:
    batch = {
        "pixels": images(SAMPLES, 3, side, side),
        "labels": jnp.arange(SAMPLES) % 2,
    }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["pixels"], params=params, train=False).logits
        return _cross_entropy(logits, batch["labels"])

    return Built(loss_fn=loss_fn, model=model.params, batch=batch)


@foreign("huggingface")
def hf_gpt2() -> Built:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=4
    )
    return _causal(hf.FlaxGPT2LMHeadModel(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_gpt_neo() -> Built:
    config = hf.GPTNeoConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    )
    return _causal(hf.FlaxGPTNeoForCausalLM(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_gptj() -> Built:
    config = hf.GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
    )
    return _causal(hf.FlaxGPTJForCausalLM(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_opt() -> Built:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=64,
        max_position_embeddings=LENGTH,
        num_attention_heads=4,
        word_embed_proj_dim=32,
    )
    return _causal(
        hf.FlaxOPTForCausalLM(config, input_shape=(1, LENGTH)), deterministic=True
    )


def _llama_like(kind: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
    )


@foreign("huggingface")
def hf_llama() -> Built:
    config = _llama_like(hf.LlamaConfig)
    return _causal(hf.FlaxLlamaForCausalLM(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_mistral() -> Built:
    config = _llama_like(hf.MistralConfig)
    return _causal(hf.FlaxMistralForCausalLM(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_gemma() -> Built:
    config = _llama_like(hf.GemmaConfig)
    return _causal(hf.FlaxGemmaForCausalLM(config, input_shape=(1, LENGTH)))


@foreign("huggingface")
def hf_bloom() -> Built:
    config = hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    return _causal(hf.FlaxBloomForCausalLM(config, input_shape=(1, LENGTH)))


def _bert_like(kind: Any, **more: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=2 * LENGTH,
        **more,
    )


@foreign("huggingface")
def hf_bert() -> Built:
    return _masked(hf.FlaxBertForMaskedLM(_bert_like(hf.BertConfig)))


@foreign("huggingface")
def hf_roberta() -> Built:
    return _masked(hf.FlaxRobertaForMaskedLM(_bert_like(hf.RobertaConfig)))


@foreign("huggingface")
def hf_albert() -> Built:
    config = _bert_like(hf.AlbertConfig, embedding_size=16)
    return _masked(hf.FlaxAlbertForMaskedLM(config))


@foreign("huggingface")
def hf_electra() -> Built:
    config = _bert_like(hf.ElectraConfig, embedding_size=16)
    return _masked(hf.FlaxElectraForMaskedLM(config))


@foreign("huggingface")
def hf_distilbert() -> Built:
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=LENGTH,
    )
    return _masked(hf.FlaxDistilBertForMaskedLM(config))


def _bart_like(kind: Any) -> Any:
    return kind(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        decoder_start_token_id=0,
    )


@foreign("huggingface")
def hf_bart() -> Built:
    return _translating(hf.FlaxBartForConditionalGeneration(_bart_like(hf.BartConfig)))


@foreign("huggingface")
def hf_marian() -> Built:
    return _translating(hf.FlaxMarianMTModel(_bart_like(hf.MarianConfig)))


@foreign("huggingface")
def hf_vit() -> Built:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=2,
    )
    return _seeing(hf.FlaxViTForImageClassification(config), 16)


@foreign("huggingface")
def hf_resnet() -> Built:
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=2
    )
    model = hf.FlaxResNetForImageClassification(config, input_shape=(1, 32, 32, 3))
    built = _seeing(model, 32)
    frozen = {"batch_stats": model.params["batch_stats"]}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["pixels"], params={"params": params, **frozen}).logits
        return _cross_entropy(logits, batch["labels"])

    return Built(loss_fn=loss_fn, model=model.params["params"], batch=built.batch)


@foreign("huggingface")
def hf_clip() -> Built:
    text = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        eos_token_id=VOCABULARY - 1,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    model = hf.FlaxCLIPModel(
        hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16),
        input_shape=((1, LENGTH), (1, 16, 16, 3)),
    )
    batch = {
        "ids": tokens(SAMPLES, LENGTH, VOCABULARY),
        "pixels": images(SAMPLES, 3, 16, 16),
    }

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model(batch["ids"], batch["pixels"], params=params).logits_per_image
        labels = jnp.asarray(np.arange(SAMPLES))
        return _cross_entropy(logits, labels) + _cross_entropy(logits.T, labels)

    return Built(loss_fn=loss_fn, model=model.params, batch=batch)


@foreign("huggingface")
def hf_wav2vec2() -> Built:
    config = hf.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
    )
    model = hf.FlaxWav2Vec2ForCTC(config, input_shape=(1, 256))

    def loss_fn(params: Any, wave: Any) -> jax.Array:
        logits = model(wave, params=params, train=False).logits
        return _cross_entropy(logits, jnp.zeros(logits.shape[:2], jnp.int32))

    return Built(loss_fn=loss_fn, model=model.params, batch=images(SAMPLES, 256))
