"""`Table`: the keys and values of a store, and who waits for a key that is not there yet.

What is asked comes as an operation and its fields, all of them bytes, and the answer goes to a function: at
once, or for GET when all keys are there.
"""

import enum
import struct
import threading
from collections.abc import Callable, Sequence

__all__ = ["AMOUNT", "Answer", "Operation", "Table"]

AMOUNT = struct.Struct("!q")  # what `add` adds, and what counts are answered with
YES, NO = b"\1", b""

Answer = Callable[[Sequence[bytes]], None]


class Operation(enum.IntEnum):
    """What is asked; the fields that belong to it, and those of its answer."""

    SET = 0  # key, value -> nothing
    GET = 1  # keys -> their values, once all are there
    ADD = 2  # key, amount -> the sum
    COMPARE_SET = 3  # key, expected, desired -> what is there now
    APPEND = 4  # key, value -> nothing
    DELETE = 5  # key -> whether it was there
    CHECK = 6  # keys -> whether all are there
    COUNT = 7  # nothing -> the number of keys


class Table:
    """Keys and values, for any number of threads."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[object, tuple[Sequence[bytes], Answer]] = {}
        self._lock = threading.Lock()

    def ask(self, operation: Operation, fields: Sequence[bytes], answer: Answer, asker: object) -> None:
        """Do what is asked, and hand over the answer.

        Args:
            operation: what to do.
            fields: see `Operation`.
            answer: gets the fields of the answer; called by the thread that makes it possible.
            asker: by which a wait is forgotten; one of its own for each wait.
        """
        with self._lock:
            if operation is Operation.GET:
                self._waiting[asker] = (fields, answer)
                found = None
            else:
                found = self._apply(operation, fields)
            ready = [(asked, *wait) for asked, wait in self._waiting.items() if self._has(wait[0])]
            for asked, _, _ in ready:
                del self._waiting[asked]
            answers = [(told, [self._values[key] for key in keys]) for _, keys, told in ready]
        if found is not None:
            answer(found)
        for told, values in answers:
            told(values)

    def forget(self, is_gone: Callable[[object], bool]) -> None:
        """Forget the waits of those who are gone."""
        with self._lock:
            for asker in [asker for asker in self._waiting if is_gone(asker)]:
                del self._waiting[asker]

    def _has(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def _apply(self, operation: Operation, fields: Sequence[bytes]) -> Sequence[bytes]:
        values = self._values
        match operation:
            case Operation.SET:
                key, value = fields
                values[key] = value
            case Operation.ADD:
                key, amount = fields
                total = int(values.get(key, b"0")) + AMOUNT.unpack(amount)[0]
                values[key] = str(total).encode()  # as torch's stores keep it
                return [AMOUNT.pack(total)]
            case Operation.COMPARE_SET:
                key, expected, desired = fields
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [values.get(key, expected)]
            case Operation.APPEND:
                key, value = fields
                values[key] = values.get(key, b"") + value
            case Operation.DELETE:
                return [NO if values.pop(fields[0], None) is None else YES]
            case Operation.CHECK:
                return [YES if self._has(fields) else NO]
            case Operation.COUNT:
                return [AMOUNT.pack(len(values))]
        return []
