"""Settings: what is valid, in which words the rest is refused, and that they survive being written down."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from training.config import Model, Settings, load_settings, parse_settings, preset_names, setting_fields
from training.errors import UserError
from training.model import Llama

ROOT = Path(__file__).parents[2]

# What the presets are named for: the published models' own counts (2 x 4096 x 32000 + 32 x ... and so on, as
# `sum(p.numel() for p in LlamaForCausalLM(config).parameters())` gives for the published config.json).
PARAMETERS = {"llama2-7b": 6_738_415_616, "llama3-8b": 8_030_261_248}


def refusal(**given: Any) -> str:
    """The message about these overrides (`train__steps="x"`), or about `config`."""
    config = given.pop("config", None)
    with pytest.raises(UserError) as caught:
        load_settings(config=config, overrides={key.replace("__", "."): value for key, value in given.items()})
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


VALUES = [
    ("train__steps", "x", "train.steps: x, expected a whole number"),
    ("train__steps", "1.5", "train.steps: 1.5, expected a whole number"),
    ("train__steps", "0", "train.steps: 0, expected at least 1"),
    ("train__steps", "99999999999", "train.steps: 99999999999, expected at most 2147483647"),
    ("train__steps", "", "train.steps: '', expected printable text"),
    ("train__steps", "none", "train.steps: none, expected a whole number"),
    ("train__seed", "-1", "train.seed: -1, expected at least 0"),
    ("train__learning_rate", "fast", "train.learning_rate: fast, expected a number"),
    ("train__learning_rate", "0", "train.learning_rate: 0, expected more than 0"),
    ("train__learning_rate", "inf", "train.learning_rate: inf, expected a finite number"),
    ("train__learning_rate", "nan", "train.learning_rate: nan, expected a finite number"),
    ("train__beta1", "1", "train.beta1: 1, expected less than 1"),
    ("data__validation_fraction", "0.6", "data.validation_fraction: 0.6, expected at most 0.5"),
    ("data__append_eod", "perhaps", "data.append_eod: perhaps, expected true or false"),
    ("train__compile", "perhaps", "train.compile: perhaps, expected auto, true or false"),
    ("train__dtype", "float16", "train.dtype: float16, expected one of 'auto', 'float32' or 'bfloat16'"),
    ("run__backend", "tpu", "run.backend: tpu, expected one of 'auto', 'cpu', 'cuda' or 'neuron'"),
    ("run__dir", "", "run.dir: '', expected printable text"),
    ("run__dir", "a\nb", "run.dir: 'a\\nb', expected printable text"),
    ("data__output", "a\u2028b", "data.output: 'a\\u2028b', expected printable text"),
    ("data__output", "\udcff", "data.output: '\\udcff', expected printable text"),
    ("data__source", "wiki", "data.source: wiki, expected one of pydocs, text:GLOB"),
    ("data__source", "text:", "data.source: text:, expected one of pydocs, text:GLOB"),
    ("data__tokenizer", "train:many", "data.tokenizer: train:many, expected train:VOCAB_SIZE"),
    (
        "data__tokenizer",
        "train:256",
        "data.tokenizer: train:256, expected train:VOCAB_SIZE with a size of at least 257",
    ),
    # Over more than one key.
    ("data__tokenizer", "train:8193", "data.tokenizer: train:8193, expected at most model.vocab_size (8192)"),
    ("train__warmup_steps", "201", "train.warmup_steps: 201, expected at most train.steps (200)"),
    ("train__min_learning_rate", "1", "train.min_learning_rate: 1.0, expected at most train.learning_rate (0.001)"),
    ("train__seq_length", "2049", "train.seq_length: 2049, expected at most model.max_position_embeddings (2048)"),
    ("train__micro_batch_size", "3", "train.global_batch_size: 16, expected a multiple of 3 (train.micro_batch_size 3"),
    ("parallel__workers", "3", "train.global_batch_size: 16, expected a multiple of 48 (train.micro_batch_size 16"),
    (
        "parallel__tensor_parallel_size",
        "2",
        "parallel.workers: 1, expected a multiple of parallel.tensor_parallel_size (2)",
    ),
    ("parallel__tensor_parallel_size", "0", "parallel.tensor_parallel_size: 0, expected at least 1"),
    ("model__hidden_size", "100", "model.hidden_size: 100, expected a multiple of 2 x model.num_attention_heads (8)"),
    (
        "model__num_key_value_heads",
        "3",
        "model.num_key_value_heads: 3, expected a divisor of model.num_attention_heads",
    ),
    # Names.
    ("train__stepz", "3", "train.stepz: unknown setting, did you mean train.steps?"),
    ("trian__steps", "3", "trian.steps: unknown setting, did you mean train.steps?"),
]


@pytest.mark.parametrize(("key", "value", "message"), VALUES, ids=[f"{key}={value!a}" for key, value, _ in VALUES])
def test_a_bad_value_is_refused(key: str, value: str, message: str) -> None:
    found = refusal(**{key: value})
    assert found.startswith(message)
    assert "\n" not in found


TENSOR_PARALLEL = [
    (
        {"parallel.workers": "8"},
        "parallel.tensor_parallel_size: 8, expected a divisor of model.num_attention_heads (4)",
    ),
    (
        {"model.num_attention_heads": "8", "model.num_key_value_heads": "2", "parallel.workers": "6"},
        "parallel.tensor_parallel_size: 6, expected a divisor of model.num_attention_heads (8)",
    ),
    (
        {"model.num_attention_heads": "12", "model.num_key_value_heads": "6", "model.hidden_size": "240"},
        "parallel.tensor_parallel_size: 4, expected a divisor or a multiple of model.num_key_value_heads (6)",
    ),
    ({"model.vocab_size": "4097"}, "model.vocab_size: 4097, expected a multiple of parallel.tensor_parallel_size (4)"),
    (
        {"model.intermediate_size": "690"},
        "model.intermediate_size: 690, expected a multiple of parallel.tensor_parallel_size (4)",
    ),
    ({"train.seq_length": "254"}, "train.seq_length: 254, expected a multiple of parallel.tensor_parallel_size (4)"),
    (
        {"parallel.workers": "24"},
        "train.global_batch_size: 16, expected a multiple of 96 (train.micro_batch_size 16 x data-parallel size 6, "
        "which is 24 workers / tensor-parallel size 4)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TENSOR_PARALLEL, ids=[message[:60] for _, message in TENSOR_PARALLEL])
def test_a_tensor_parallel_size_that_does_not_fit_is_refused(changes: dict[str, str], message: str) -> None:
    size = message.partition(": ")[2].partition(",")[0] if message.startswith("parallel") else "4"
    given = {"parallel.workers": size, "parallel.tensor_parallel_size": size, **changes}
    with pytest.raises(UserError) as caught:
        load_settings(overrides=given)
    assert str(caught.value) == message


def test_workers_that_share_layers_share_a_batch() -> None:
    settings = load_settings(
        overrides={"parallel.workers": "8", "parallel.tensor_parallel_size": "4", "train.micro_batch_size": "2"}
    )
    assert settings.parallel.data_parallel_size == 2
    assert settings.accumulation_steps == 4


FILES = [
    (b"train: {steps: x}", "mine.yaml: train.steps: x, expected a whole number"),
    (b"train: {steps: yes}", "mine.yaml: train.steps: true, expected a number"),
    (b"train: {steps: [1, 2]}", "mine.yaml: train.steps: [1, 2], expected a whole number"),
    (b"train: {learning_rate: .inf}", "mine.yaml: train.learning_rate: inf, expected a finite number"),
    (b"train: {stepz: 1}", "mine.yaml: train.stepz: unknown setting, did you mean train.steps?"),
    (b"train: {1: 2}", "mine.yaml: train.1: unknown setting, expected one of seq_length"),
    (b"trian: {steps: 1}", "mine.yaml: trian: unknown section, did you mean train?"),
    (b"steps: 1", "mine.yaml: steps: unknown section, did you mean train.steps?"),
    (b"run: {dir: ~}", "mine.yaml: run.dir: none, expected a path"),
    (b"run: {dir: 'a\n\n  b'}", "mine.yaml: run.dir: 'a\\nb', expected printable text"),
    (b"data: {tokenizer: 5}", "mine.yaml: data.tokenizer: 5, expected text"),
    (b"train:\n  steps: 1\n  seed: 2\n  steps: 3\n", "mine.yaml, line 4: found steps twice, expected sections"),
    (b"train: {}\nrun: {}\ntrain: {}\n", "mine.yaml, line 3: found train twice, expected sections"),
    (b"train:\n\tsteps: 1", "mine.yaml, line 2: found character '\\t' that cannot start any token, expected"),
    (b"train: *none", "mine.yaml, line 1: found undefined alias 'none', expected sections"),
    (b"train: !!python/name:os.system x", "mine.yaml, line 1: could not determine a constructor"),
    (b"train: 5", "mine.yaml: train: 5, expected sections"),
    (b"7: {a: 1}", "mine.yaml: 7: {'a': 1}, expected sections"),
    (b"[1]: {a: 1}", "mine.yaml, line 1: found unhashable key, expected sections"),
    (b"- a", "mine.yaml: ['a'], expected sections"),
    (b"train: {steps: 2026-13-45}", "mine.yaml: not YAML, expected sections"),
    (b"\xff\xfe\xff", "mine.yaml: not YAML, expected sections"),
    (b"a: \0", "mine.yaml: not YAML, expected sections"),
]


@pytest.mark.parametrize(("content", "message"), FILES, ids=[str(content) for content, _ in FILES])
def test_a_bad_file_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    found = refusal(config=file).replace(str(file), file.name)
    assert found.startswith(message)
    assert "\n" not in found


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert refusal(config=tmp_path) == f"{tmp_path}: cannot be read (Is a directory), expected a YAML file of settings"
    assert refusal(config=tmp_path / "no").startswith(f"{tmp_path / 'no'}: cannot be read (No such file or directory)")


def test_every_mistake_has_its_line_and_its_origin(file: Path) -> None:
    file.write_text("train: {steps: x, seed: y}")
    found = refusal(config=file, train__seed="z").split("\n")
    assert found == [f"{file}: train.steps: x, expected a whole number", "train.seed: z, expected a whole number"]


def test_a_long_value_is_cut() -> None:
    assert len(refusal(train__steps="9" * 5000)) < 200


def test_preset_and_config_exclude_one_another(file: Path) -> None:
    with pytest.raises(UserError, match="--preset and --config: expected one of them"):
        load_settings(preset="tiny", config=file)


@pytest.mark.parametrize("name", ["tinny", "../presets/tiny", "", "tiny.yaml"])
def test_an_unknown_preset_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"--preset: unknown preset '.*', (did you mean tiny\?|expected one of .*tiny)"):
        load_settings(preset=name)


def test_overrides_go_before_the_file_and_the_file_before_the_defaults(file: Path) -> None:
    file.write_text("train:\n  steps: 30\n  seed: 5\nrun:\n")
    settings = load_settings(config=file, overrides={"train.seed": "6"})
    assert (settings.train.steps, settings.train.seed, settings.train.beta1) == (30, 6, Settings().train.beta1)
    tiny = load_settings(preset="tiny", overrides={"model.num_hidden_layers": "1"})
    assert (tiny.model.num_hidden_layers, tiny.model.vocab_size) == (1, 4096)
    assert load_settings() == Settings()


def test_none_unsets_only_what_may_be_unset() -> None:
    settings = load_settings(
        preset="tiny",
        overrides={"data.output": "None", "train.activation_checkpointing": "none", "data.text_key": "null"},
    )
    assert settings.data.output is None
    assert settings.train.activation_checkpointing == "none"
    assert settings.data.text_key == "null"


def test_what_yaml_and_shells_write_otherwise_is_taken(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    file.write_text("train: {learning_rate: 1e-3, min_learning_rate: 0}\nrun: {dir: ~/runs/ü 日本}\n")
    settings = load_settings(config=file)
    assert settings.train.learning_rate == 1e-3
    assert settings.run.dir == Path("/home/somebody/runs/ü 日本")
    assert settings.data_dir == settings.run.dir / "data"


def test_a_tokenizer_may_be_a_folder_named_train() -> None:
    assert load_settings(overrides={"data.tokenizer": "train"}).data.tokenizer == "train"


def test_settings_never_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().train.steps = 3  # type: ignore[misc]


positive = st.floats(1e-300, 1e300)
names = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1).filter(str.strip)
paths = names.filter(lambda name: not name.startswith("~")).map(Path)


@st.composite
def any_model(draw: st.DrawFn, largest: int = 10_000) -> Model:
    kv_heads, group, half = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 16))
    heads = kv_heads * group
    return Model(
        hidden_size=heads * half * 2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=heads * draw(st.integers(1, max(1, largest // heads))),
        num_hidden_layers=draw(st.integers(1, 4)),
        vocab_size=2 * heads * draw(st.integers(1, max(1, largest // (2 * heads)))),
        rope_theta=draw(positive),
        rms_norm_eps=draw(positive),
        max_position_embeddings=draw(st.integers(1, 10_000)),
        tie_word_embeddings=draw(st.booleans()),
        init_from=draw(st.none() | paths),
    )


@st.composite
def any_settings(draw: st.DrawFn) -> Settings:
    model = draw(any_model())
    steps, rates = draw(st.integers(1, 2**31 - 1)), sorted((draw(positive), draw(positive)))
    groups, micro = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    tensor_parallel = draw(st.sampled_from([1, model.num_key_value_heads, model.num_attention_heads]))
    length = draw(st.integers(1, model.max_position_embeddings))
    tokenizers = names.filter(lambda name: not name.startswith("train:"))
    if model.vocab_size >= 257:
        tokenizers |= st.integers(257, model.vocab_size).map("train:{}".format)
    return parse_settings(
        {
            "model": model.model_dump(),
            "data": {
                "source": draw(st.just("pydocs") | names.map("jsonl:{}".format)),
                "text_key": draw(names),
                "tokenizer": draw(tokenizers),
                "output": draw(st.none() | paths),
                "skip_bad": draw(st.booleans()),
            },
            "train": {
                "seq_length": length,
                "micro_batch_size": micro,
                "global_batch_size": micro * groups * draw(st.integers(1, 64)),
                "steps": steps,
                "warmup_steps": draw(st.integers(0, steps)),
                "min_learning_rate": rates[0],
                "learning_rate": rates[1],
                "seed": draw(st.integers(0, 2**63 - 1)),
                "compile": draw(st.sampled_from(["auto", True, False])),
                "activation_checkpointing": draw(st.sampled_from(["none", "selective", "full"])),
            },
            "parallel": {
                "workers": groups * tensor_parallel,
                "tensor_parallel_size": tensor_parallel,
                "sequence_parallel": draw(st.booleans()) if length % tensor_parallel == 0 else False,
            },
            "run": {"dir": draw(paths), "launcher": draw(st.sampled_from(["local", "ray", "mpi"]))},
        }
    )


@given(any_settings())
@effort(max_examples=60, deadline=None)
def test_settings_survive_being_written_to_yaml(tmp_path_factory: pytest.TempPathFactory, settings: Settings) -> None:
    file = tmp_path_factory.mktemp("settings") / "settings.yaml"
    file.write_text(yaml.safe_dump(settings.resolved(), sort_keys=False), encoding="utf-8")
    again = load_settings(config=file)
    assert again.resolved() == settings.resolved()
    # `resolved` fills in the derived folders, and nothing else.
    filled = {"data.output": settings.data_dir, "run.cache_dir": settings.cache_dir}
    for name in setting_fields():
        section, _, key = name.partition(".")
        wanted = filled.get(name, getattr(getattr(settings, section), key))
        assert getattr(getattr(again, section), key) == wanted, name


@given(any_model(largest=300))
@effort(max_examples=30, deadline=None)
def test_num_parameters_counts_the_weights_of_the_model(config: Model) -> None:
    with torch.device("meta"):
        model = Llama(config.model_copy(update={"max_position_embeddings": 8}))
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters()


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_what_their_names_say(name: str) -> None:
    settings = load_settings(preset=name)
    assert settings.run.dir == Path("runs") / name
    with torch.device("meta"):
        counted = sum(parameter.numel() for parameter in Llama(settings.model).parameters())
    assert settings.model.num_parameters() == counted
    if name in PARAMETERS:
        assert counted == PARAMETERS[name]
    if name == "llama-1b":
        assert 1.1e9 < counted < 1.35e9


def test_there_are_the_presets_that_the_issue_names() -> None:
    assert preset_names() == ["llama-1b", "llama2-7b", "llama3-8b", "tiny"]


def test_absolute_settings_name_the_same_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings(overrides={"run.dir": "runs/a", "model.init_from": "b"}).absolute()
    folders = (settings.run.dir, settings.data_dir, settings.cache_dir, settings.checkpoint_dir)
    assert folders == tuple(tmp_path / "runs" / name for name in ("a", "a/data", "compile-cache", "a/checkpoints"))
    assert settings.model.init_from == tmp_path / "b"


def test_every_setting_is_described() -> None:
    for name, field in setting_fields().items():
        assert field.description, name
        assert len(field.description.split()) >= 2, name


def test_the_readme_lists_the_settings_as_they_are() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "settings_table.py"))["table"]()
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), "run `make docs`"
