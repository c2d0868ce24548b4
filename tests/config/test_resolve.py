"""Flat and nested forms of a configuration, and its hash."""

from __future__ import annotations

import json
import subprocess
import sys

from servekit.config.bench import BenchConfig
from servekit.config.compose import compose_serve
from servekit.config.resolve import as_dict, config_hash, flatten
from servekit.config.schema import Config, EngineConfig, ModelConfig


def test_flatten_gives_plain_values_by_dotted_key() -> None:
    values = flatten(Config(ModelConfig(source="x")))
    assert values["model.source"] == "x"
    assert values["engine.device"] == "auto"
    assert values["scheduler.prefix_cache.kind"] == "hash"
    assert values["scheduler.admission.watermark"] == 0.01
    assert json.loads(json.dumps(values)) == values


def test_a_mapping_is_one_value() -> None:
    assert flatten(BenchConfig(extra_body={"a": [1]}))["extra_body"] == {"a": [1]}


def test_as_dict_holds_the_same_values() -> None:
    config = Config(ModelConfig(source="x"))
    nested = as_dict(config)
    for key, value in flatten(config).items():
        at = nested
        *sections, name = key.split(".")
        for section in sections:
            at = at[section]
        assert at[name] == value


def test_the_hash_tells_configurations_apart_however_they_were_written() -> None:
    one = Config(ModelConfig(source="x"))
    assert config_hash(one) == config_hash(Config(ModelConfig(source="x")))
    assert config_hash(one) != config_hash(Config(ModelConfig(source="x"), engine=EngineConfig(threads=1)))
    assert config_hash(compose_serve(["+preset=balanced"]).config) == config_hash(compose_serve().config)


def test_the_hash_is_the_same_in_every_process() -> None:
    program = ("from servekit.config.schema import *; from servekit.config.resolve import config_hash; "
               "print(config_hash(Config(ModelConfig(source='x'))))")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == config_hash(Config(ModelConfig(source="x")))
