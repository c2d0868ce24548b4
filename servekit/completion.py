"""Shell completion: the scripts, and the candidates for the word under the cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from servekit.config.describe import PRESET, Root, allowed_values

CANDIDATES = "candidates"
"""The hidden word after `servekit completion` that the scripts use."""

_BASH = """\
# servekit completion for bash: eval "$(servekit completion bash)"
_servekit() {
    local line="${COMP_LINE:0:COMP_POINT}" before="" candidate
    local current="${line##* }"
    # bash completes only what follows the last =
    [[ "$current" == *=* && "$COMP_WORDBREAKS" == *=* ]] && before="${current%=*}="
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$before"}")
    done < <("$1" completion candidates "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" != *[=.] ]] || compopt -o nospace
}
complete -o default -F _servekit servekit
"""

_ZSH = """\
# servekit completion for zsh: eval "$(servekit completion zsh)"
_servekit() {
    local -a candidates
    candidates=(${(f)"$(${words[1]} completion candidates "${(j: :)words[1,CURRENT]}" 2>/dev/null)"})
    if (( $#candidates )); then
        compadd -S '' -- $candidates
    else
        _files
    fi
}
compdef _servekit servekit
"""

_FISH = """\
# servekit completion for fish: servekit completion fish | source
function __servekit_candidates
    set -l words (commandline -opc) (commandline -ct)
    servekit completion candidates (string join ' ' -- $words) 2>/dev/null
end
complete -c servekit -a '(__servekit_candidates)'
"""

SCRIPTS: Mapping[str, str] = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def candidates(line: str, commands: Iterable[str], roots: Mapping[str, Callable[[], Root[Any]]]) -> list[str]:
    """What the last word of a command line may be completed to; `line` ends at the cursor."""
    words = line.split()[1:]
    current = "" if line[-1:].isspace() or not words else words.pop()
    return sorted({word for word in _possible(words, current, commands, roots) if word.startswith(current)})


def _possible(words: list[str], current: str, commands: Iterable[str],
              roots: Mapping[str, Callable[[], Root[Any]]]) -> Iterator[str]:
    match words:
        case []:
            yield from (*commands, "--help", "--version")
        case ["help"]:
            yield from roots
        case ["completion"]:
            yield from SCRIPTS
        case ["config", *rest]:
            name = rest[0] if rest and rest[0] in roots else "serve"
            yield from () if rest else roots
            yield from ("--json", "--yaml")
            yield from _settings(roots[name](), current)
        case [name, *_] if name in roots or name == "doctor":
            yield "--help"
            yield from _settings(roots["serve" if name == "doctor" else name](), current)


def _settings(root: Root[Any], current: str) -> Iterator[str]:
    key, equals, _ = current.partition("=")
    if equals:
        yield from (f"{key}={value}" for value in _values(root, key.lstrip("+").replace("/", ".")))
        return
    for name in _names(root, "/" in current):
        yield _next_part(name, current)
        if name.startswith(f"{PRESET}="):
            yield f"+{name}"


def _values(root: Root[Any], key: str) -> tuple[str, ...]:
    if key in root.groups:
        return root.groups[key].option_names
    return allowed_values(root.keys[key].annotation) if key in root.keys else ()


def _names(root: Root[Any], with_slashes: bool) -> Iterator[str]:
    """Everything that can be set, up to and with its `=`; a group in the spelling that the user has begun."""
    yield from (f"{group.name if with_slashes else group.key}=" for group in root.groups.values())
    yield from (f"{key.name}=" for key in root.keys.values() if not key.chooses_component)


def _next_part(name: str, current: str) -> str:
    """One level at a time: `scheduler.` before `scheduler.admission.` before its keys."""
    end = name.find(".", len(current))
    return name if end < 0 or not name.startswith(current) else name[:end + 1]
