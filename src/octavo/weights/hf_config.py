"""config.json of a Llama checkpoint as a ModelConfig; what can't be run exactly is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import ModelConfig, RopeScaling
from ..errors import ModelLoadError

ARCHITECTURE = "LlamaForCausalLM"


class Settings:
    """Typed look-ups in one JSON object; JSON's null counts as absent.

    Errors name the file and the key.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def _get(self, key: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.path}: {key} is missing")
        if type(value) not in kinds:
            raise self.refusal(key, f"must be {wanted}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._get(key, (int,), "a whole number", default))

    def real(self, key: str, default: float | None = None) -> float:
        try:
            return float(self._get(key, (int, float), "a number", default))
        except OverflowError:
            raise self.refusal(key, "must be a number within reason") from None

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, (str,), "text", default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, (bool,), "true or false", default))

    def array(self, key: str) -> list[Any]:
        return list(self._get(key, (list,), "a list", []))

    def section(self, key: str) -> Settings:
        """A nested object; an absent one is empty."""
        return Settings(self._get(key, (dict,), "an object", {}), self.path)

    def refusal(self, key: str, what: str) -> ModelLoadError:
        """An error about one value, shown short."""
        shown = repr(self.values.get(key))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelLoadError(f"{self.path}: {key} is {shown}: {what}")


def model_config(settings: Settings) -> ModelConfig:
    """Read config.json; sizes are held against each other by expected.check_config.

    Raises ModelLoadError for another architecture, a missing or mistyped key, or a feature that
    would change the results and is not supported.
    """
    _refuse_other_architectures(settings)
    _refuse_features(settings)
    hidden_size = settings.integer("hidden_size")
    num_heads = settings.integer("num_attention_heads")
    max_positions = settings.integer("max_position_embeddings")
    theta, scaling = _rope(settings, max_positions)
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size"),
        num_hidden_layers=settings.integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=settings.integer("num_key_value_heads", num_heads),
        head_dim=settings.integer("head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=settings.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=settings.real("rms_norm_eps", 1e-6),  # LlamaConfig's own default
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=settings.flag("tie_word_embeddings", False),
        name=settings.text("_name_or_path", ""),
    )


def _refuse_other_architectures(settings: Settings) -> None:
    architectures = settings.values.get("architectures") or [ARCHITECTURE]
    if architectures != [ARCHITECTURE] or settings.text("model_type", "llama") != "llama":
        raise ModelLoadError(
            f"{settings.path}: the architecture is {architectures!r} (model_type "
            f"{settings.values.get('model_type')!r}); Octavo runs the Llama family "
            f"({ARCHITECTURE}: Llama 2 and 3, SmolLM2, TinyLlama)"
        )


def _refuse_features(settings: Settings) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if settings.flag(key, False):
            raise settings.refusal(key, "linear layers with a bias are not supported")
    if settings.text("hidden_act", "silu") not in ("silu", "swish"):
        raise settings.refusal("hidden_act", "only silu is supported")
    if settings.real("partial_rotary_factor", 1.0) != 1.0:
        raise settings.refusal("partial_rotary_factor", "only whole heads can be rotated")
    if settings.has("quantization_config"):
        raise settings.refusal(
            "quantization_config", "take the unquantised checkpoint, or a GGUF file of the model"
        )
    if _window_in_use(settings):
        key = "layer_types" if settings.has("layer_types") else "sliding_window"
        raise settings.refusal(key, "sliding-window attention is not supported")


def _window_in_use(settings: Settings) -> bool:
    """Whether any position would lose sight of an earlier one.

    layer_types speaks for each layer and wins; use_sliding_window: false switches a window off; a
    window as long as the context never closes.
    """
    if settings.has("layer_types"):
        return any(kind != "full_attention" for kind in settings.array("layer_types"))
    if not settings.flag("use_sliding_window", True) or not settings.has("sliding_window"):
        return False
    window = settings.integer("sliding_window")
    return window < settings.integer("max_position_embeddings")


def _rope(settings: Settings, max_positions: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, from rope_parameters (transformers 5) or the older keys."""
    key = "rope_parameters" if settings.has("rope_parameters") else "rope_scaling"
    section = settings.section(key)
    if settings.has("rope_scaling") and section.values != settings.values["rope_scaling"]:
        raise settings.refusal("rope_scaling", "rope_parameters says something else")
    if any(isinstance(value, dict) for value in section.values.values()):
        raise settings.refusal(key, "rotary parameters that differ by layer are not supported")
    theta = section.real("rope_theta", settings.real("rope_theta", 10000.0))
    if section.real("partial_rotary_factor", 1.0) != 1.0:
        raise section.refusal("partial_rotary_factor", "only whole heads can be rotated")
    kind = section.text("rope_type", section.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise settings.refusal(key, "of the rope scalings, linear and llama3 are supported")
    factor = section.real("factor")
    if not factor >= 1.0:
        raise section.refusal("factor", "a rope scaling factor is at least 1")
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=factor)
    scaling = RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=section.real("low_freq_factor"),
        high_freq_factor=section.real("high_freq_factor"),
        original_max_position_embeddings=section.integer(
            "original_max_position_embeddings", max_positions
        ),
    )
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor:
        raise section.refusal("high_freq_factor", "must be above low_freq_factor, which is above 0")
    if scaling.original_max_position_embeddings < 1:
        raise section.refusal("original_max_position_embeddings", "must be at least 1")
    return theta, scaling
