"""What a coordinator may be told: every field of every frame is looked at before it is used.

from a trainer
    hello       role, version, pid, host, name, number, member, generation
    beat        step, doing, pace (seconds per sample), cpu (seconds used so far)
    arrived     generation (the one it leaves; 0: a newcomer), progress, why, suspect
    commits     generation, records [[epoch, start, stop, first, last], …]; with a sixth number,
                the member that made the update alone
    shares      generation, version, shares
    told, rolled_back, leave
    ledger      version, ledger: what is consumed; all leases are void
    lease       epoch, wanted, unit (leases are multiples of it), used (ranges done with)
    commit, give_back                 like those two, of strategies whose members work apart
from a supervisor
    hello, gone, drop

Frames that have to arrive carry `seq`, counted by the sender: they are answered by an `ack` with
the same number, and sent again over a new connection until they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from echelon.cluster.coordinator.frames import BadFrame, Message

NAME = 255
TEXT = 2000
PROGRESS = 16
RECORDS = 4096
MEMBERS = 1 << 16
_LARGEST = 1 << 62

Check = Callable[[Any], bool]


def one_line(text: str, length: int = TEXT) -> str:
    """As frames want it: printable, in one line, not too long."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:length]


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _positive(value: Any) -> bool:
    return type(value) is int and 0 < value < _LARGEST


def _signed(value: Any) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= TEXT and value.isprintable()


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= NAME and value.isprintable()


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _many(check: Check, most: int) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


def _record(value: Any) -> bool:
    if not (type(value) is list and len(value) in (5, 6) and all(map(_whole, value))):
        return False
    _, start, stop, first, last, *_ = value
    return bool(start < stop and 1 <= first <= last + 1)  # last + 1: consumed without an update


def _pair(value: Any) -> bool:
    """A range that is not empty."""
    whole = type(value) is list and len(value) == 2 and all(map(_whole, value))
    return whole and value[0] < value[1]


def _ledger(value: Any) -> bool:
    """As `Ledger.state_dict` gives it."""
    match value:
        case {"samples": samples, "whole": list(whole), "parts": list(parts)}:
            triples = _many(_many(_whole, 3), MEMBERS)
            return _positive(samples) and triples(whole) and all(map(_page, parts))
    return False


def _page(value: Any) -> bool:
    match value:
        case {"epoch": epoch, "done": list(done)}:
            return _whole(epoch) and all(map(_pair, done))
    return False


_WHOLE = (_whole, "a whole number of at least 0")
_POSITIVE = (_positive, "a whole number of at least 1")
_MAYBE_WHOLE = (_or_none(_whole), "a whole number of at least 0 or null")
_NUMBER = (_number, "a number of at least 0")
_MAYBE_NUMBER = (_or_none(_number), "a number of at least 0 or null")
_FLAG = (_flag, "true or false")
_TEXT = (_text, f"printable text of at most {TEXT} characters")
_NAME = (_name, f"printable text of at most {NAME} characters")
_SEQ = (_or_none(_positive), "a whole number of at least 1 or null")
_RANGE = {"seq": _SEQ, "epoch": _WHOLE, "start": _WHOLE, "stop": _POSITIVE}

_FIELDS: dict[str, dict[str, tuple[Check, str]]] = {
    "hello": {
        "role": (("trainer", "supervisor").__contains__, "'trainer' or 'supervisor'"),
        "version": _WHOLE,
        "pid": _POSITIVE,
        "host": _NAME,
        "name": _NAME,
        "number": _MAYBE_WHOLE,
        "member": _MAYBE_WHOLE,
        "generation": _WHOLE,
    },
    "beat": {
        "step": _MAYBE_WHOLE,
        "doing": _NAME,
        "pace": _MAYBE_NUMBER,
        "cpu": _MAYBE_NUMBER,
    },
    "arrived": {
        "generation": _WHOLE,
        "progress": (_many(_signed, PROGRESS), f"a list of at most {PROGRESS} whole numbers"),
        "why": _TEXT,
        "suspect": _MAYBE_WHOLE,
    },
    "commits": {
        "seq": _SEQ,
        "generation": _POSITIVE,
        "records": (
            _many(_record, RECORDS),
            f"a list of at most {RECORDS} records [epoch, start, stop, first, last(, member)]",
        ),
    },
    "shares": {
        "seq": _SEQ,
        "generation": _POSITIVE,
        "version": _WHOLE,
        "shares": (_many(_number, MEMBERS), "a list of numbers of at least 0"),
    },
    "told": {"seq": _SEQ, "text": _TEXT},
    "rolled_back": {"seq": _SEQ, "version": _WHOLE, "why": _TEXT},
    "leave": {
        "seq": _SEQ,
        "why": _TEXT,
        "fatal": _FLAG,
        "over": (_or_none(_flag), "true, false or null"),
    },
    "ledger": {"seq": _SEQ, "version": _WHOLE, "ledger": (_ledger, "a ledger's state")},
    "lease": {
        "seq": _SEQ,
        "epoch": _WHOLE,
        "wanted": _POSITIVE,
        "unit": (_or_none(_positive), "a whole number of at least 1 or null"),
        "used": (_or_none(_many(_pair, RECORDS)), "a list of ranges [start, stop] or null"),
    },
    "commit": {**_RANGE, "version": _WHOLE},
    "give_back": _RANGE,
    "gone": {"pid": _POSITIVE, "status": (_signed, "a whole number")},
    "drop": {"member": _WHOLE, "seconds": _NUMBER},
}
SUPERVISORS = {"gone", "drop"}
"""What only a supervisor may say, and all it says after its hello."""


def check(message: Message) -> None:
    """Refuse a frame that is not as the table says. A field that may be null may be left out."""
    kind = message["kind"]
    fields = _FIELDS.get(kind)
    if fields is None:
        raise BadFrame(f"a frame of the unknown kind {one_line(kind, 40)!r}")
    for name, (right, rule) in fields.items():
        value = message.get(name)
        if not right(value):
            shown = one_line(repr(value), 60)
            raise BadFrame(f"a frame {kind!r} says {name} = {shown}: it must be {rule}")
    if "stop" in fields and not message["start"] < message["stop"]:
        raise BadFrame(f"a frame {kind!r} has an empty range")
