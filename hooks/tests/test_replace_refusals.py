"""What isn't replaced in loaded modules, since nobody knows what it is."""

from __future__ import annotations

import pytest


def rewritten(change):
    """Code that changes the module's file."""
    return f"text = open(early.__file__).read(); open(early.__file__, 'w').write(text{change})"


def refusals():
    """What happens to the module before the plugin comes, and the reason for which nothing is replaced."""
    return {
        "replaced by another function": (
            "early.double = lambda number: 7",
            "7",
            "is no function of this module as it is loaded",
        ),
        "code replaced": (
            "early.double.__code__ = (lambda number, factor=2: 7).__code__",
            "7",
            "isn't what the file says; somebody replaced it",
        ),
        "not a function any more": ("early.double = print", None, "is no function of this module as it is loaded"),
        "somebody else's function": ("from os.path import join; early.double = join", None, "is no function of this"),
        "name taken": ("early.plus_one = 3", "6", "the name plus_one is taken in the loaded module"),
        "file changed": (rewritten(".replace('* factor', '+ factor')"), "6", "isn't what the file says"),
        "file moved": (rewritten(".replace('\\n\\n\\ndef', '\\n\\n\\n\\ndef')"), "6", "isn't what the file says"),
        "line moved": (
            rewritten(".replace('    result =', '    # More.\\n    result =')"),
            "6",
            "isn't what the file says",
        ),
        "file patched": (
            rewritten(
                ".replace('import wraps', 'import wraps\\nfrom other_end import plus_one')"
                ".replace('    result =', '    number = plus_one(number)\\n    result =')"
            ),
            "6",
            "was patched after this process had imported it; start the process again.",
        ),
        "file gone": ("import os; os.remove(early.__file__)", "6", "No such file"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_is_not_as_the_file_says_stays_as_it_is(early, case):
    """Nobody knows what would be replaced there: the module isn't touched, and the reason is kept and logged."""
    before, result, reason = refusals()[case]
    out = early('patch("double", "double")').run(
        "from vllm.v1 import early",
        before,
        """
        import logging
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("vllm").addHandler(handler)
        import kvplug_hooks
        kvplug_hooks.install()
        entry = kvplug_hooks.status()["double"]
        """,
        f"print({'None' if result is None else 'early.double(3)'}, hasattr(early, '__kvplug_patches__'), entry.state)",
        "print(entry.reason, len(messages), entry.reason in messages[0], sep='\\n')",
    )
    first, said, count, logged = out.split("\n")
    assert first == f"{result} False failed"
    assert reason in said
    assert (count, logged) == ("1", "True")
