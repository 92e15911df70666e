"""Settings of a connector: one place to write them, and an error for everything that would be ignored.

Their place is `kv_connector_extra_config` of vLLM's `--kv-transfer-config`. Each can come from the environment instead,
and variables of AIBrix are taken over where there is an equivalent.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretBytes,
    SecretStr,
    ValidationError,
)

from kvplug.errors import ConfigError
from kvplug.log import get_logger
from kvplug.variables import AIBRIX_PREFIXES, KVPLUG_PREFIX

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AIBRIX_PREFIXES", "AibrixVariable", "L1Settings", "NoEquivalentError", "Settings", "Size"]

logger = get_logger(__name__)

_EXTRA_CONFIG = "extra config"
_DEFAULT = "default"
_GIB = 1 << 30
#: What pydantic reads as a size, but for bits. K is KB.
_SIZE = re.compile(r"\s*(\d*\.)?\d+\s*(B|[KMGTPE](i?B)?)?\s*", re.IGNORECASE)

#: What Kubernetes sets in every pod for a service whose name begins with kvplug.
_SERVICE_LINK = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)$")

#: What was said about AIBrix's variables, so that it's said once per process and not once per role.
_reported: set[str] = set()


class NoEquivalentError(ValueError):
    """A value of an AIBrix variable has no equivalent here; the message says why."""


@dataclass(frozen=True)
class AibrixVariable:
    """Stands in a setting's annotation for the AIBrix variable that is taken over into it."""

    name: str
    #: Turns the variable's text into the setting's value. Raises `NoEquivalentError` where there is none, and
    #: ValueError, with a message that goes on after the variable's name, where the text is wrong.
    convert: Callable[[str], Any] = str


class Settings(BaseModel):
    """Base of a connector's settings: a frozen pydantic model that knows where each value came from.

    A field of a subclass is a setting. Its variable is `env_prefix` and its name in capitals. Its description is its
    documentation, an example (`examples`) its remedy in an error, and an `AibrixVariable` in its annotation is read
    too.
    A setting whose type is `SecretStr` or `SecretBytes` is never written to a log or an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    #: Beginning of the variables. Whoever has settings of their own outside kvplug chooses another.
    env_prefix: ClassVar[str] = KVPLUG_PREFIX
    #: Variables that begin so but are no settings.
    other_variables: ClassVar[frozenset[str]] = frozenset({"KVPLUG_DISABLE"})

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Keep the sources, which come as the validation's context."""
        self._sources = dict(context or {})

    @classmethod
    def load(cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the settings: extra config first, then the variables, then AIBrix's, then defaults.

        A variable that is set to nothing counts as unset. Variables of AIBrix that have no equivalent are named once,
        in one line of the log.

        Args:
            extra_config: vLLM's `kv_transfer_config.kv_connector_extra_config`.
            environ: The environment.

        Raises:
            ConfigError: A key or a variable is unknown, or a value is wrong. One sentence for each.

        """
        extra_config = extra_config or {}
        problems = [*cls._unknown_keys(extra_config), *cls._unknown_variables(environ)]
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        ignored = {name: "" for name in sorted(environ) if name.startswith(AIBRIX_PREFIXES) and environ[name]}
        for field in cls.model_fields:
            variable, aibrix = cls.variable(field), cls.aibrix_variable(field)
            if aibrix is not None and aibrix.name in ignored:
                del ignored[aibrix.name]
                try:
                    values[field], sources[field] = aibrix.convert(environ[aibrix.name]), aibrix.name
                except NoEquivalentError as error:
                    ignored[aibrix.name] = f" ({error})"
                except ValueError as error:
                    problems.append(f"Environment variable {aibrix.name} {error}; correct or unset it.")
            if environ.get(variable):
                values[field], sources[field] = environ[variable], variable
            if field in extra_config:
                values[field], sources[field] = extra_config[field], _EXTRA_CONFIG
        try:
            settings = cls.model_validate(values, context=sources)
        except ValidationError as error:
            problems += cls._wrong_values(error, values, sources)
        if problems:
            raise ConfigError("\n".join(problems))
        _report_ignored(ignored)
        return settings

    def source_of(self, field: str) -> str:
        """Say where a setting's value came from: `extra config`, a variable's name, or `default`.

        Raises:
            KeyError: There is no such setting.

        """
        if field not in type(self).model_fields:
            raise KeyError(field)
        return self._sources.get(field, "argument" if field in self.model_fields_set else _DEFAULT)

    def describe(self) -> dict[str, Any]:
        """Return the values in effect, as a dict for JSON. Secrets are masked."""
        return self.model_dump(mode="json")

    @classmethod
    def variable(cls, field: str) -> str:
        """Return the name of a setting's environment variable."""
        return cls.env_prefix + field.upper()

    @classmethod
    def aibrix_variable(cls, field: str) -> AibrixVariable | None:
        """Return the AIBrix variable that is taken over into a setting, or None."""
        return next((item for item in cls.model_fields[field].metadata if isinstance(item, AibrixVariable)), None)

    @classmethod
    def owner_of(cls, name: str) -> str | None:
        """Say what a setting belongs to that these settings could have but don't, and what to do; None for nothing."""
        del name
        return None

    @classmethod
    def _unknown_keys(cls, extra_config: Mapping[str, Any]) -> Iterator[str]:
        known = list(cls.model_fields)
        for key in extra_config:
            if key not in known:
                what = f"Setting {key!r} of kv_connector_extra_config"
                owner = cls.owner_of(str(key))
                yield f"{what} {owner}" if owner else _unknown(what, str(key), known)

    @classmethod
    def _unknown_variables(cls, environ: Mapping[str, str]) -> Iterator[str]:
        # Several connectors may run in one process, and one environment may serve several.
        owners = (cls, *_subclasses(Settings))
        known = {owner.variable(field) for owner in owners for field in owner.model_fields} | cls.other_variables
        for name in sorted(environ):
            if not environ[name] or not name.startswith(cls.env_prefix):
                continue  # set to nothing counts as unset
            if name not in known and not _SERVICE_LINK.search(name):
                if cls.owner_of(name.removeprefix(cls.env_prefix).lower()):
                    continue  # one environment may serve engines with other tiers
                own = [*map(cls.variable, cls.model_fields), *cls.other_variables]
                yield _unknown(f"Environment variable {name}", name, sorted(known), own)

    @classmethod
    def _wrong_values(
        cls, error: ValidationError, values: Mapping[str, Any], sources: Mapping[str, str]
    ) -> Iterator[str]:
        for problem in error.errors(include_url=False):
            if not problem["loc"]:
                yield f"The settings don't fit together: {problem['msg']}."
                continue
            field = str(problem["loc"][0])
            source = sources.get(field, _DEFAULT)
            sentence = f"Setting {field} (from {source})"
            example = next(iter(cls.model_fields[field].examples or ()), None)
            remedy = "" if example is None else f" to, for example, {example!r}"
            if problem["type"] == "missing":
                yield f"Setting {field} has no default: set it{remedy}."
                continue
            if _is_secret(cls.model_fields[field].annotation):
                yield f"{sentence} is wrong; its value isn't shown."
                continue
            message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
            remedy = remedy and f"; set it{remedy}"
            yield f"{sentence} is {reprlib.repr(values.get(field))}, but {message[:1].lower()}{message[1:]}{remedy}."


def _unknown(what: str, name: str, known: list[str], first: Iterable[str] = ()) -> str:
    """Say that a name is unknown, and what was probably meant: one of the first, or else of all."""
    near = difflib.get_close_matches(name, first, n=1) or difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "remove it."
    return f"{what} is unknown: {remedy} Known are {', '.join(known)}."


def _subclasses(cls: type[Settings]) -> Iterator[type[Settings]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_secret(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_is_secret(argument) for argument in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, (SecretStr, SecretBytes))


def _report_ignored(ignored: Mapping[str, str]) -> None:
    if not ignored:
        return
    names = ", ".join(name + reason for name, reason in sorted(ignored.items()))
    if names not in _reported:
        _reported.add(names)
        logger.warning("These AIBrix variables have no equivalent in kvplug and are ignored: %s.", names)


def _whole_size(value: object) -> object:
    """Let through what is a size from its first character to its last, and what has become one already.

    By itself, pydantic takes True for a byte, doesn't see what follows the unit, cuts fractions off numbers, and knows
    bits.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if is_number or (isinstance(value, str) and _SIZE.fullmatch(value)):
        return value
    raise ValueError(
        "should be a number of bytes, or a number and a unit (B; KB, MB, GB, TB, PB, EB; KiB, MiB, GiB, TiB, PiB, EiB)"
    )


#: The type of a setting that is a size: a number of bytes, or text with a unit.
Size = Annotated[ByteSize, BeforeValidator(_whole_size)]


def _gigabytes(text: str) -> int:
    """Turn AIBrix's gigabytes, of 2**30 bytes and perhaps fractional, into bytes."""
    try:
        return int(float(text) * _GIB)
    except (OverflowError, ValueError):
        raise ValueError(f"is {text!r}, but should be a number of gigabytes") from None


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _aibrix_policy(text: str) -> str:
    policies: Iterable[str] = get_args(EvictionPolicy)
    if text.lower() not in policies:
        raise NoEquivalentError(f"{text} isn't available here")
    return text


#: Eviction policies of the L1 tier.
EvictionPolicy = Literal["lru", "fifo", "s3fifo"]


class L1Settings(Settings):
    """Settings of the L1 tier, in host memory, and of block keys."""

    l1_size_per_rank: Annotated[Size, AibrixVariable("AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB", _gigabytes)] = Field(
        default=ByteSize(4 * _GIB),
        gt=0,
        examples=["8GiB"],
        description="Host memory for KV blocks of one rank, in bytes or with a unit: GiB and MiB are powers of two, GB "
        "and MB powers of ten.",
    )
    l1_eviction_policy: Annotated[
        EvictionPolicy,
        BeforeValidator(_lower),
        AibrixVariable("AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY", _aibrix_policy),
    ] = Field(
        default="lru",
        description="Which block goes when there is no room: the least recently used one (`lru`), the oldest one "
        "(`fifo`), or the oldest one that wasn't used again (`s3fifo`).",
    )
    model_id: str | None = Field(
        default=None,
        min_length=1,
        examples=["my-model-v3"],
        description="Name that stands for the model's weights in block keys, instead of their content.",
    )
