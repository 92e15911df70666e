"""Facts about vLLM's sources: what counts as so, and that a release that isn't as declared is named."""

from __future__ import annotations

import pytest
from matrixlib.checks import Abstract, All, Has, ImportedOnlyBelow, Inherits, InOrder, Never, Says, Sets, Takes
from matrixlib.contract import contract
from matrixlib.fact import Fact, fields
from matrixlib.facts import FACTS
from matrixlib.reading import Missing, Sources

from kvplug_hooks.installed import Tree

MODULE = """
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elsewhere import Guarded

VARIABLE: int | None = None


@dataclass
class Data:
    number: int
    names: list[str] | None = None


class Base:
    def __init__(self, first, second, third=None):
        self.first = first
        self.second: int = second
        other.third = third

    @abstractmethod
    def needed(self): ...

    def given(self):
        self.before(1)
        with self.context():
            self.after(self.first, key=self.second)
        if self.first:
            self.before(2)
            self.last()


class Derived(Base):
    def needed(self): ...
"""


@pytest.fixture
def sources(tmp_path):
    """Return a function that makes a release with this module and others."""

    def make(version="0.19.0", **modules):
        for path, text in {"vllm/_version": f"__version__ = {version!r}", "vllm/module": MODULE, **modules}.items():
            file = tmp_path / f"{path}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Sources(Tree(tmp_path))

    return make


PATH = "vllm/module.py"
TRUE = [
    Has(PATH, "VARIABLE"),
    Has(PATH, "Guarded"),
    Has(PATH, "Base.given"),
    Has(PATH, "Data.names"),
    Takes(PATH, "Base.__init__", ("first", "second")),
    Takes(PATH, "Base.__init__", ("first", "second", "third")),
    Sets(PATH, "Base", "first"),
    Sets(PATH, "Base", "second"),
    Says(PATH, "Data", "number: int"),
    Says(PATH, "Data", "names: list[str] | None = None"),
    Says(PATH, "VARIABLE", "None"),
    Says(PATH, "Base.given", "self.before(_)"),
    Says(PATH, "Base.given", "self.after(...)"),
    Says(PATH, "Base.given", "self.after(self.first, key=self.second)"),
    Says(PATH, "Base.__init__", "self.first = first"),
    Never(PATH, "Base.given", "self.never(...)"),
    InOrder(PATH, "Base.given", ("self.context()", "self.after(...)", "self.last()")),
    Abstract(PATH, "Base", ("needed",)),
    Inherits(PATH, "Derived", "Base", "given"),
    All((Has(PATH, "Base"), Has(PATH, "Data"))),
]
FALSE = [
    (Has("vllm/none.py", "x"), "there is no vllm/none.py"),
    (Has(PATH, "Base.none"), "has no Base.none"),
    (Has(PATH, "None.given"), "has no None.given"),
    (Takes(PATH, "Base.__init__", ("first",)), "takes first, second, third"),
    (Takes(PATH, "Base.__init__", ("first", "other")), "takes first, second, third"),
    (Takes(PATH, "Data", ("number",)), "isn't a function"),
    (Sets(PATH, "Base", "third"), "never sets self.third"),
    (Says(PATH, "Data", "number: float"), "has no `number: float`"),
    (Says(PATH, "Data", "names: list[str] | None"), "has no `names"),
    (Says(PATH, "Base.given", "self.before()"), "has no `self.before()`"),
    (Says(PATH, "Base.given", "self.after(_, _)"), "has no `self.after(_, _)`"),
    (Never(PATH, "Base.given", "self.before(_)"), "has `self.before(_)` in line"),
    (Never(PATH, "Base.none", "self.before(_)"), "has no Base.none"),
    (InOrder(PATH, "Base.given", ("self.before(_)", "self.after(...)")), "and `self.after(...)` in line"),
    (InOrder(PATH, "Base.given", ("self.last()", "self.none()")), "has no `self.none()`"),
    (InOrder(PATH, "Base.given", ("self.after(...)", "self.context()")), "in line"),
    (Abstract(PATH, "Base", ("needed", "given")), "has the abstract methods needed"),
    (Inherits(PATH, "Derived", "Base", "needed"), "Derived of vllm/module.py has a needed of its own"),
    (Inherits(PATH, "Data", "Base", "given"), "Data of vllm/module.py doesn't derive from Base"),
    (All((Has(PATH, "Base"), Has(PATH, "None"))), "has no None"),
]


@pytest.mark.parametrize("check", TRUE, ids=repr)
def test_what_is_so(sources, check):
    """Each way of asking finds what is there."""
    check(sources())


@pytest.mark.parametrize(("check", "missing"), FALSE, ids=repr)
def test_what_is_not_so(sources, check, missing):
    """And says what it found instead, if it isn't."""
    with pytest.raises(Missing) as error:
        check(sources())
    assert missing in str(error.value)


@pytest.mark.parametrize(
    "line", ["import vllm.worker.runner", "from vllm.worker.runner import R", "from vllm.worker import other, runner"]
)
def test_imports_from_outside_of_a_folder(sources, line):
    """An import at a module's top counts, also under a condition; one in a function or for type checks doesn't."""
    check = ImportedOnlyBelow("vllm.worker.runner", "vllm/worker")
    harmless = f"if TYPE_CHECKING:\n    {line}\ndef f():\n    {line}\n"
    check(sources(**{"vllm/engine": harmless, "vllm/worker/gpu": f"{line}\n"}))
    for text in (f"{line}\n", f"try:\n    {line}\nexcept ImportError:\n    pass\n"):
        with pytest.raises(Missing, match=r"vllm/engine\.py imports vllm\.worker\.runner in line [12]"):
            check(sources(**{"vllm/engine": text}))


def test_a_fact_of_all_releases(sources):
    """If it isn't so, the sentence names the release, what is missing, where, and who needs it."""
    there, missing = (Fact(f"{name} is there", Has(PATH, name), "kvplug.compat") for name in ("Base", "Gone"))
    assert there.problem(sources()) is None
    assert missing.problem(sources()) == (
        "In vLLM 0.19.0 it isn't so that Gone is there: vllm/module.py has no Gone; kvplug.compat relies on it."
    )


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [("0.19.0", None, True), ("0.19.1", None, False), (None, "0.19.0", False), ("0.18.1", "0.19.1", True)],
)
def test_a_fact_of_some_releases_is_looked_at_on_both_sides(sources, since, until, expected):
    """What begins or ends with a release must be there in its span, and mustn't be outside of it."""
    there = Fact("it is there", Has(PATH, "Base"), "kvplug.compat", since=since, until=until)
    missing = Fact("it is there", Has(PATH, "Gone"), "kvplug.compat", since=since, until=until)
    assert (there.problem(sources()) is None) is expected
    assert (missing.problem(sources()) is None) is not expected
    if not expected:
        span = f"from {since} on" if since else f"before {until}"
        assert there.problem(sources()) == (
            f"In vLLM 0.19.0 it is so that it is there, which is declared for releases {span} (kvplug.compat)."
        )


def test_facts_are_of_runners(sources):
    """A fact that matters for one runner says nothing about the other, and isn't asked where that runner isn't used."""
    broken = [Fact(name, Has(PATH, "Gone"), "x", runners=runners) for name, runners in (("1", ("v1",)), ("2", ("v2",)))]
    both = Fact("both", Has(PATH, "Gone"), "x")
    problems = contract(sources(), ("v1", "v2"), [*broken, both])
    assert [len(problems[runner]) for runner in ("v1", "v2")] == [2, 2]
    assert [list(contract(sources(), ("v1",), broken)), len(contract(sources(), ("v1",), broken)["v1"])] == [["v1"], 1]


def test_fields_of_a_dataclass(sources):
    """A field is declared as in vLLM, with its type, and with its span if it has one."""
    facts = fields(
        PATH, "Data", "x", "number: int", ("names: list[str] | None = None", "0.20.0"), ("none: int", "0.1", "0.9")
    )
    assert facts[0].name == "Data has number: int"
    assert [(fact.since, fact.until) for fact in facts] == [(None, None), ("0.20.0", None), ("0.1", "0.9")]
    assert [fact.problem(sources()) is None for fact in facts] == [True, False, True]


def test_the_facts_hold_in_the_installed_vllm(vllm_tree):
    """The fast loop's share of the contract: the release that is installed."""
    assert contract(Sources(vllm_tree), ("v1", "v2")) == {"v1": [], "v2": []}


def test_facts_have_names_of_their_own():
    """A name says what is so, once."""
    names = [fact.name for fact in FACTS]
    assert len(set(names)) == len(names)
