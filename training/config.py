"""Every setting of a training run, in one schema with two readers.

The command line (`python -m training`) and the Pulumi program read these classes, so a batch that does not
divide or a tokenizer larger than the model is an error before anything is started or paid for.

    settings = load_settings(preset="tiny", overrides={"train.steps": "20"})

Precedence: overrides, then the file (`preset` or `config`), then the defaults below. This module needs
pydantic and PyYAML only.
"""

from __future__ import annotations

import os
import types
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from training.errors import UserError
from training.messages import expected_one_of, explain, matching, shown

PRESETS = Path(__file__).parent / "presets"
SOURCE_KINDS = ("pydocs", "text:GLOB", "jsonl:GLOB", "parquet:GLOB", "hub:NAME[/CONFIG]")

Count = Annotated[int, Field(le=2**31 - 1)]  # of anything: more is a slip of the keyboard
_NOT_TEXT = {"Cc", "Cs", "Zl", "Zp"}  # Unicode's control characters, halves of characters, ends of lines


def _kinds(annotation: Any) -> set[Any]:
    """The types that a field may hold: int and None for `int | None`."""
    if hasattr(annotation, "__metadata__"):  # Annotated, inside a union
        return _kinds(annotation.__origin__)
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation} if isinstance(annotation, type) else set()


class Section(BaseModel):
    """A group of settings: unknown keys are errors, values never change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _meant(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what pydantic would take and no one means: YAML's `yes` as 1, an empty path as the current folder."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (kinds := _kinds(kind)) and kinds & {int, float}:
            raise ValueError("expected a number")
        if isinstance(value, str | Path):
            text = str(value)
            if not text.strip() or any(unicodedata.category(character) in _NOT_TEXT for character in text):
                raise ValueError("expected printable text")
            if kind in (Path, Path | None):
                return os.path.expanduser(text)
        return value


class Data(Section):
    """Where the text comes from and how it becomes tokens."""

    source: str = Field("pydocs", description=f"the text: {' | '.join(SOURCE_KINDS)}")
    text_key: str = Field("text", description="field of a JSONL, Parquet or Hub record with its text")
    tokenizer: str = Field(
        "train:8192", description="train:VOCAB_SIZE trains a BPE on the source; a path or a Hub name loads one"
    )
    output: Path | None = Field(None, description="folder of the token store [default: RUN.DIR/data]")
    validation_fraction: float = Field(0.02, ge=0, le=0.5, description="share of the documents kept for validation")
    append_eod: bool = Field(True, description="end each document with the tokenizer's end-of-document id")
    skip_bad: bool = Field(False, description="count and skip records that cannot be read, instead of stopping")
    shard_mb: Count = Field(
        256, ge=1, description="text per shard of the store, in MiB: the unit of work and of resuming"
    )

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        kind, _, rest = value.partition(":")
        if value != "pydocs" and (kind not in ("text", "jsonl", "parquet", "hub") or not rest):
            raise ValueError(f"expected one of {', '.join(SOURCE_KINDS)}")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if value.startswith("train:") and not (value[6:].isdecimal() and int(value[6:]) >= 257):
            raise ValueError("expected train:VOCAB_SIZE with a size of at least 257 (256 bytes and the end token)")
        return value

    @property
    def trained_vocab_size(self) -> int | None:
        """N of the tokenizer `train:N`; None for one that is loaded."""
        return int(self.tokenizer[6:]) if self.tokenizer.startswith("train:") else None


class Model(Section):
    """The shape of the Llama, by the names of Hugging Face's LlamaConfig."""

    hidden_size: Count = Field(256, ge=2, description="width of the residual stream")
    intermediate_size: Count = Field(688, ge=1, description="width inside the SwiGLU feed-forward")
    num_hidden_layers: Count = Field(4, ge=1, description="transformer layers")
    num_attention_heads: Count = Field(4, ge=1, description="query heads")
    num_key_value_heads: Count = Field(4, ge=1, description="key and value heads; fewer than query heads is GQA")
    vocab_size: Count = Field(8192, ge=2, description="rows of the embedding; at least the tokenizer's size")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    max_position_embeddings: Count = Field(2048, ge=1, description="longest sequence that the model is made for")
    rms_norm_eps: float = Field(1e-5, gt=0, description="epsilon of RMSNorm")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    tie_word_embeddings: bool = Field(False, description="use the embedding as the output head too")
    init_from: Path | None = Field(None, description="Hugging Face folder whose weights training starts from")

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"model.hidden_size: {self.hidden_size}, expected a multiple of 2 x model.num_attention_heads "
                f"({2 * self.num_attention_heads}): rotary embeddings turn pairs of each head's dimensions"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads: {self.num_key_value_heads}, expected a divisor of "
                f"model.num_attention_heads ({self.num_attention_heads})"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Dimensions of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def num_parameters(self) -> int:
        """All weights, embedding and output head included (a tied head counts once)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + self.hidden_size + embeddings


class Train(Section):
    """The batch, the optimizer, and how long."""

    seq_length: Count = Field(256, ge=1, description="tokens per sample")
    global_batch_size: Count = Field(16, ge=1, description="samples per optimizer step, over all workers")
    micro_batch_size: Count = Field(16, ge=1, description="samples per forward pass of one worker")
    steps: Count = Field(200, ge=1, description="optimizer steps of the whole run")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate")
    min_learning_rate: float = Field(0.0, ge=0, description="learning rate at the end of the cosine")
    warmup_steps: Count = Field(20, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay of the matrices")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    seed: int = Field(1234, ge=0, lt=2**63, description="seed of the weights and of the sample order")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="compute dtype; weights and optimizer stay float32. auto: bfloat16 where the device has it"
    )
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile; auto: where a compiler is found")
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        "none", description="recompute in the backward pass: nothing, all but matrix products and attention, or layers"
    )
    loss_chunk: Count = Field(1024, ge=1, description="tokens whose logits exist at one time")
    eval_every: Count = Field(50, ge=1, description="steps between evaluations (the last step is always evaluated)")
    eval_samples: Count = Field(64, ge=1, description="samples of the validation part per evaluation, at most")
    master_weights: bool = Field(
        True, description="neuron: float32 weights beside the bfloat16 ones; false: bfloat16 ones alone"
    )
    accumulate_float32: bool = Field(
        True, description="neuron: sum the gradients of micro-batches in float32; false: in bfloat16"
    )
    fail_on_compile: bool = Field(False, description="end a run that compiles what `precompile` should have compiled")
    hang_timeout: float = Field(600.0, gt=0, description="seconds without progress that end an attempt")

    @model_validator(mode="after")
    def _schedule(self) -> Train:
        if self.warmup_steps > self.steps:
            raise ValueError(f"train.warmup_steps: {self.warmup_steps}, expected at most train.steps ({self.steps})")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate: {self.min_learning_rate}, "
                f"expected at most train.learning_rate ({self.learning_rate})"
            )
        return self


class Parallel(Section):
    """How a run is spread out."""

    workers: Count = Field(1, ge=1, description="processes, one per device (a NeuronCore, a GPU)")
    tensor_parallel_size: Count = Field(
        1, ge=1, description="workers that share the matrices of a layer; more than 1 needs the neuron backend"
    )
    sequence_parallel: bool = Field(
        True, description="workers that share matrices share the sequence between the layers too"
    )
    zero_1: bool = Field(True, description="neuron: share out the optimizer's state over the data-parallel workers")

    @model_validator(mode="after")
    def _whole_groups(self) -> Parallel:
        if self.workers % self.tensor_parallel_size:
            raise ValueError(
                f"parallel.workers: {self.workers}, expected a multiple of parallel.tensor_parallel_size "
                f"({self.tensor_parallel_size})"
            )
        return self

    @property
    def data_parallel_size(self) -> int:
        """Groups of workers that each hold the whole model."""
        return self.workers // self.tensor_parallel_size


class Run(Section):
    """Where a run lives and what it runs on."""

    dir: Path = Field(Path("runs/default"), description="folder of the run; shared storage on a cluster")
    backend: Literal["auto", "cpu", "cuda", "neuron"] = Field(
        "auto", description="device; auto: cuda where there is one, neuron in its image, else cpu"
    )
    launcher: Literal["local", "ray", "mpi"] = Field(
        "local",
        description="what starts the workers; ray: embedded or RAY_ADDRESS; mpi: mpirun, here or on its hostfile",
    )
    cache_dir: Path | None = Field(None, description="folder of compiled code [default: beside RUN.DIR, compile-cache]")
    max_failures: Count = Field(3, ge=0, description="restarts from the last checkpoint before a run gives up")
    metrics_address: str | None = Field(
        None, description="HOST:PORT of an endpoint for Prometheus while training, such as 127.0.0.1:9400"
    )

    @field_validator("metrics_address")
    @classmethod
    def _an_address(cls, value: str | None) -> str | None:
        form = matching(
            r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\]):\d{1,5}", "HOST:PORT, such as 127.0.0.1:9400 or 0.0.0.0:9400"
        )
        return value and form(value)


class Checkpoint(Section):
    """When weights, optimizer, schedule and random states are saved."""

    every: Count = Field(50, ge=1, description="steps between checkpoints (the last step is always saved)")
    keep: Count = Field(2, ge=1, description="newest checkpoints kept")


class Settings(Section):
    """All settings of a run; see `load_settings`."""

    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    parallel: Parallel = Parallel()
    run: Run = Run()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.train.seq_length > self.model.max_position_embeddings:
            raise ValueError(
                f"train.seq_length: {self.train.seq_length}, expected at most "
                f"model.max_position_embeddings ({self.model.max_position_embeddings})"
            )
        parallel = self.parallel
        multiple = self.train.micro_batch_size * parallel.data_parallel_size
        if self.train.global_batch_size % multiple:
            size = f"data-parallel size {parallel.data_parallel_size}"
            if parallel.tensor_parallel_size > 1:
                size += f", which is {parallel.workers} workers / tensor-parallel size {parallel.tensor_parallel_size}"
            raise ValueError(
                f"train.global_batch_size: {self.train.global_batch_size}, expected a multiple of {multiple} "
                f"(train.micro_batch_size {self.train.micro_batch_size} x {size})"
            )
        if self.model.num_attention_heads % parallel.tensor_parallel_size:
            raise ValueError(
                f"parallel.tensor_parallel_size: {parallel.tensor_parallel_size}, expected a divisor of "
                f"model.num_attention_heads ({self.model.num_attention_heads})"
            )
        sizes = (self.model.num_key_value_heads, parallel.tensor_parallel_size)
        if max(sizes) % min(sizes):
            raise ValueError(
                f"parallel.tensor_parallel_size: {parallel.tensor_parallel_size}, expected a divisor or a multiple of "
                f"model.num_key_value_heads ({self.model.num_key_value_heads})"
            )
        split = {"model.vocab_size": self.model.vocab_size, "model.intermediate_size": self.model.intermediate_size}
        if parallel.sequence_parallel:
            split["train.seq_length"] = self.train.seq_length
        for key, length in split.items():
            if length % parallel.tensor_parallel_size:
                raise ValueError(
                    f"{key}: {length}, expected a multiple of parallel.tensor_parallel_size "
                    f"({parallel.tensor_parallel_size})"
                )
        if (self.data.trained_vocab_size or 0) > self.model.vocab_size:
            raise ValueError(
                f"data.tokenizer: {self.data.tokenizer}, expected at most model.vocab_size ({self.model.vocab_size})"
            )
        return self

    @property
    def data_dir(self) -> Path:
        """Folder of the token store."""
        return self.data.output or self.run.dir / "data"

    @property
    def cache_dir(self) -> Path:
        """Folder of compiled code, shared by the runs beside one another."""
        return self.run.cache_dir or self.run.dir.parent / "compile-cache"

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the checkpoints."""
        return self.run.dir / "checkpoints"

    @property
    def accumulation_steps(self) -> int:
        """Forward passes of one worker per optimizer step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.parallel.data_parallel_size)

    def absolute(self) -> Settings:
        """The same settings with absolute folders, for processes that start in another working directory."""
        data = self.data.model_copy(update={"output": self.data_dir.absolute()})
        run = self.run.model_copy(update={"dir": self.run.dir.absolute(), "cache_dir": self.cache_dir.absolute()})
        init_from = self.model.init_from and self.model.init_from.absolute()
        model = self.model.model_copy(update={"init_from": init_from})
        return self.model_copy(update={"data": data, "run": run, "model": model})

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Every setting as plain YAML values, the derived folders filled in."""
        values = self.model_dump(mode="json")
        values["data"]["output"] = str(self.data_dir)
        values["run"]["cache_dir"] = str(self.cache_dir)
        return values


def setting_fields() -> dict[str, FieldInfo]:
    """`section.key` -> pydantic FieldInfo, in the order of the classes: what `--help` and the README list."""
    return {f"{section}.{key}": field for section in Settings.model_fields for key, field in _keys(section).items()}


def preset_names() -> list[str]:
    """Names that `--preset` takes."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def load_settings(
    preset: str | None = None, config: Path | None = None, overrides: dict[str, str] | None = None
) -> Settings:
    """Settings from a preset or a file, with overrides (`section.key` -> text) on top.

    Raises `UserError` with one line per mistake, each naming the key, the value and what was expected.
    """
    values: dict[str, dict[str, Any]] = {}
    origin = ""
    if preset is not None and config is not None:
        raise UserError("--preset and --config: expected one of them, not both")
    if preset is not None:
        config = PRESETS / f"{preset}.yaml"
        if preset not in preset_names():
            raise UserError(f"--preset: unknown preset {preset!r}{expected_one_of(preset, preset_names())}")
    if config is not None:
        values, origin = read_yaml(config), str(config)
    for name, text in (overrides or {}).items():
        if name not in setting_fields():
            raise UserError(f"{name}: unknown setting{expected_one_of(name, list(setting_fields()))}")
        section, _, key = name.partition(".")
        unset = setting_fields()[name].default is None and text.lower() in ("none", "null")
        values.setdefault(section, {})[key] = None if unset else text
    return parse_settings(values, origin, from_elsewhere=set(overrides or {}))


def parse_settings(values: dict[str, Any], origin: str = "", from_elsewhere: set[str] | None = None) -> Settings:
    """Settings from nested plain values, such as a YAML file or a Pulumi stack's config.

    `origin` (a file's name) is put before a message about a value of that file, `from_elsewhere` names the settings
    (`section.key`) that are not. Raises `UserError` with one line per mistake.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(shown(part) for part in item["loc"][:2])
            mine = key not in from_elsewhere if from_elsewhere and len(item["loc"]) > 1 else not from_elsewhere
            lines.append((f"{origin}: " if origin and mine else "") + _explain(key, item))
        raise UserError("\n".join(dict.fromkeys(lines))) from None


class _OneOfEachKey(yaml.SafeLoader):
    """YAML without duplicate keys, of which PyYAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"found {key.value} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Sections of keys and values as a file has them, not validated yet. Raises `UserError`."""
    wanted = "expected sections such as `train:` with `key: value` lines"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _OneOfEachKey)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a YAML file of settings") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: {error.problem or 'not YAML'}, {wanted}") from None
    except (yaml.YAMLError, ValueError):  # a ValueError: not UTF-8, or a date such as 2026-13-45
        raise UserError(f"{path}: not YAML, {wanted}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: {shown(values)}, {wanted}")
    for section, keys in values.items():
        if not isinstance(section, str) or (section in _sections() and not isinstance(keys, dict | None)):
            raise UserError(f"{path}: {section}: {shown(keys)}, {wanted}")
    return {section: {} if keys is None else keys for section, keys in values.items()}


def _keys(section: str) -> dict[str, FieldInfo]:
    group = Settings.model_fields[section].annotation
    assert isinstance(group, type)
    assert issubclass(group, Section)
    return group.model_fields


def _sections() -> list[str]:
    return list(Settings.model_fields)


def _explain(key: str, item: Any) -> str:
    """One pydantic error as one line: the key, the value, what was expected."""
    if item["type"] in ("extra_forbidden", "invalid_key"):
        section, _, rest = key.partition(".")
        if not rest:
            within = [name for name in setting_fields() if name.endswith(f".{key}")]
            return f"{key}: unknown section{expected_one_of(key, within or _sections())}"
        return f"{key}: unknown setting{expected_one_of(rest, list(_keys(section)), f'{section}.')}"
    if len(item["loc"]) < 2 and item["type"] == "value_error":  # a validator over several keys, which names them itself
        return str(item["msg"].removeprefix("Value error, "))
    if key == "train.compile":
        return f"{key}: {shown(item['input'])}, expected auto, true or false"
    return explain(key, item)
