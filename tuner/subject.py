"""What is tuned, where servekit's own engine and another server differ: what is searched, attacked, and emitted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from servekit.config.resolve import config_hash
from servekit.config.schema import Config, KernelSet
from servekit.tuner.adviser import Adviser
from servekit.tuner.attack import AttackLog, attack_process
from servekit.tuner.default_space import Facts
from servekit.tuner.emission import TunedFor, tuned_yaml
from servekit.tuner.engine_host import EngineHost
from servekit.tuner.executor import Description, Host
from servekit.tuner.grammar import parse_space
from servekit.tuner.hot_audit import HotAudit
from servekit.tuner.launch import Configuration, LaunchConfig
from servekit.tuner.launch_script import launch_files
from servekit.tuner.server_host import ServerHost
from servekit.tuner.server_settings import ServerSettings
from servekit.tuner.settings import Settings
from servekit.tuner.space import Space

TUNED = "tuned.yaml"


class Subject(Protocol):
    """What is tuned."""

    @property
    def host(self) -> Host:
        """What brings it up."""

    def space(self, about: Description) -> Space:
        """What is searched of it. Raises ConfigError."""

    def fingerprint(self, space: Space) -> str:
        """Equal for studies that search the same, and that start from the same where it must be."""

    def inform(self, adviser: Adviser) -> None:
        """Tell an adviser of the steps of every run, where they are known."""

    def heed(self, audit: HotAudit) -> None:
        """Change in a fresh process only what an audit does not trust in a live one."""

    def attack(self, config: Configuration) -> AttackLog | None:
        """Attack its memory; None: there is no way to."""

    def emitted(self, config: Configuration, tuned_for: TunedFor) -> Mapping[str, str]:
        """The files that serve a configuration: their texts by their names, the one to start with first."""

    def serve_command(self, path: Path) -> str:
        """What to type to serve with a file that was emitted."""


@dataclass(frozen=True)
class OwnEngine:
    """servekit's own engine."""

    settings: Settings
    base: Config
    host: EngineHost

    def space(self, about: Description) -> Space:
        """One of those that need not be written, or the user's own."""
        assert about.max_model_len is not None
        is_gpu = about.details["name"].startswith("cuda")
        facts = Facts(os.cpu_count() or 1, is_gpu, about.max_model_len,
                      has_graphs=is_gpu and about.details["kernels"] == KernelSet.triton.value)
        return parse_space(self.settings.search, self.base, facts)

    def fingerprint(self, space: Space) -> str:
        """That of the knobs alone: configurations are complete, so that their base does not matter."""
        return space.fingerprint

    def inform(self, adviser: Adviser) -> None:
        """Of every run that nothing disturbed."""
        self.host.on_run = adviser.learn

    def heed(self, audit: HotAudit) -> None:
        """From its next start on."""
        self.host.always_cold = audit.demoted

    def attack(self, config: Configuration) -> AttackLog:
        """Long prompts, many requests, swapping."""
        assert isinstance(config, Config)
        return attack_process(config, self.host.local, self.host.cache_dir, self.settings.budget.timeout_s)

    def emitted(self, config: Configuration, tuned_for: TunedFor) -> Mapping[str, str]:
        """tuned.yaml."""
        assert isinstance(config, Config)
        return {TUNED: tuned_yaml(config, self.settings.base_overrides, tuned_for)}

    def serve_command(self, path: Path) -> str:
        """With servekit itself."""
        return f"servekit serve {path}"


@dataclass(frozen=True)
class OtherServer:
    """A server that is started with flags."""

    server: ServerSettings
    host: ServerHost

    def space(self, about: Description) -> Space:
        """That of its knobs."""
        return self.server.space.space

    def fingerprint(self, space: Space) -> str:
        """That of the command and the flags as well."""
        return f"{self.server.space.fingerprint} {config_hash(self.server.launch())}"

    def inform(self, adviser: Adviser) -> None:
        """Nothing is known of its steps."""

    def heed(self, audit: HotAudit) -> None:
        """Every trial is a fresh process anyway."""

    def attack(self, config: Configuration) -> None:
        """Nobody knows how much memory it has, or what it does when that is used up."""

    def emitted(self, config: Configuration, tuned_for: TunedFor) -> Mapping[str, str]:
        """A shell script, and the file of knobs if it reads one."""
        assert isinstance(config, LaunchConfig)
        return launch_files(config, tuned_for)

    def serve_command(self, path: Path) -> str:
        """With its own command, which the script holds."""
        return f"sh {path}"
