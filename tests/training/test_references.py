"""Objects to which a callable refers: each is found once, with a name that is equal in every process."""

from __future__ import annotations

import collections
import functools
import logging
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparkhvd.training.loss_functions import ClassMean
from sparkhvd.training.references import is_of_users_class, named_globals, references

pytestmark = pytest.mark.pure


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def tensors(root: object) -> dict[str, bool]:
    """Return whether the root has the found tensors, by path."""
    found = list(references(root))
    assert len({id(each.value) for each in found}) == len(found)
    return {each.path: each.is_own for each in found if isinstance(each.value, Tensor)}


def same_elsewhere(root: object) -> dict[str, bool]:
    """Return the tensors, which must be the same after a pickle."""
    found = tensors(root)
    assert list(tensors(pickle.loads(cloudpickle.dumps(root)))) == list(found)
    return found


class Loss:
    """A callable object with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __call__(self, output: Tensor, label: Tensor) -> Tensor:
        return output


def plain(output: Tensor, label: Tensor, **others: Any) -> Tensor:
    return output


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (Loss(w=[weight(), weight()]), ["w.0", "w.1"]),
        (Loss(w={"a": (weight(), {3: weight()})}), ["w.a.0", "w.a.1.3"]),
        (Loss(w={1: weight(), "1": weight(), ("k",): weight()}), ["w.1", "w.1_2", "w.2"]),
        (Loss(w=collections.deque([weight()])), ["w.0"]),
        (Loss(h=types.SimpleNamespace(w=weight())), ["h.w"]),
        (Loss(h=Loss(h=Loss(h=Loss(h=Loss(w=weight()))))), ["h.h.h.h.w"]),
        (Loss(w=torch.zeros(2, requires_grad=True)), ["w"]),
        (functools.partial(plain, weights=[weight()]), ["weights.0"]),
        (functools.partial(Loss(w=weight()).__call__, weight()), ["w", "0"]),
        (ClassMean(Loss(w=weight()), 0, torch.ones(2)), ["w"]),
        (Loss(w=weight(), s={weight()}), ["w"]),  # a set has no order
        (Loss(w=Loss(log=logging.getLogger(), a=np.zeros(2), g=torch.Generator())), []),
    ],
)
def test_tensors_in_an_object_get_stable_names(root: object, expected: list[str]) -> None:
    assert same_elsewhere(root) == dict.fromkeys(expected, True)


def test_tensors_in_slots_and_class_attributes_are_found() -> None:
    class Base:
        shared = weight()
        __slots__ = ("__private", "empty", "own")

        def __init__(self) -> None:
            self.own, self.__private = weight(), weight()

    class Slotted(Base):
        __slots__ = ()

        def __call__(self) -> None: ...

    assert same_elsewhere(Slotted()) == dict.fromkeys(["_Base__private", "own", "shared"], True)


def test_tensors_used_by_functions_are_found_but_not_owned() -> None:
    first, second, third = weight(), weight(), weight()

    def inner(
        output: Tensor, default: Tensor = second, *, keyword: tuple[Tensor, ...] = (third,)
    ) -> Tensor:
        return output + first

    names = ["first", "default", "keyword.0"]
    assert same_elsewhere(inner) == dict.fromkeys(names, False)
    assert tensors(Loss(f=inner)) == {f"f.{name}": False for name in names}
    # The callable's own tensors come first.
    assert tensors(Loss(f=inner, w=first))["w"]

    class Callable:
        def __call__(self) -> Any:
            return inner

        @staticmethod
        def static() -> Tensor:
            return first

        @property
        def value(self) -> Tensor:
            return first

    assert set(tensors(Callable())) == {f"__call__.inner.{name}" for name in names}
    inner.scale = weight()  # type: ignore[attr-defined]
    assert tensors(inner)["scale"]


GLOBAL, UNUSED = weight(), weight()


def names_globals(output: Any) -> Any:
    return (lambda: GLOBAL)(), output.UNUSED  # an attribute


def test_global_tensors_count_only_if_pickled_by_value() -> None:
    assert named_globals(names_globals) == {"GLOBAL": GLOBAL}  # type: ignore[arg-type]
    assert tensors(names_globals) == {}  # each process imports its own
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        assert tensors(names_globals) == {"GLOBAL": False}
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_reference_search_enters_only_plain_attributes_of_modules() -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.w = nn.Linear(2, 2), weight()
            self.nets, self.plain = [self.net], [weight()]

    root = nn.Sequential(Criterion())
    found = {path: value for path, value, _ in references(root)}
    assert {p for p, v in found.items() if isinstance(v, (Tensor, nn.Module))} == {"", "0.plain.0"}
    assert tensors(Loss(net=root[0].net, of=references)) == {}
    left_out = {id(root), *map(id, root.modules()), *map(id, root.parameters())}
    assert [p for p, v, _ in references(lambda: root, left_out) if isinstance(v, nn.Module)] == []


def test_reference_search_is_bounded() -> None:
    deep: Any = weight()
    for _ in range(100):
        deep = [deep]
    many = Loss(
        deep=deep, wide=[Loss(x=i) for i in range(20_000)], n=list(range(10**6)), w=weight()
    )
    many.itself = many
    found = list(references(many))
    assert 1000 < len(found) <= 10_000
    assert "w" in {each.path for each in found}


def test_objects_of_user_classes_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "of_a_package.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(str(installed))
    thing = __import__("of_a_package").Thing()
    assert is_of_users_class(Loss())
    for other in (
        thing,
        Loss,
        logging.getLogger(),
        [],
        plain,
        torch.Generator(),
        ClassMean(plain, 0, None),
    ):
        assert not is_of_users_class(other)
