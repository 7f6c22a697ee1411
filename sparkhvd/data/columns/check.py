"""Check a source's columns on the driver, without a job: names, roles, dtypes and policies."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sparkhvd.data.columns.schema import (
    FLOATS,
    AnyField,
    AnySchema,
    Column,
    DataSchema,
    dtype_name,
    raw_column,
    tensor_column,
)
from sparkhvd.errors import InvalidArgumentError, listed

# Dtypes of columns, by name or by order: text, or a dtype of torch or numpy.
Dtypes = Mapping[str, object] | Sequence[object]
# Policy for rows with nulls and invalid numbers of a column: ("error",), ("skip",), ("keep",) or ("fill", value).
Policy = tuple[Any, ...]


def check_schema(
    df_schema: AnySchema,
    *,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weight_col: str | None = None,
    validation: float | str | None = None,
    group_col: str | None = None,
    model_dtype: str = "float32",
    feature_dtypes: Dtypes | None = None,
    label_dtypes: Dtypes | None = None,
    class_labels: Sequence[str] = (),
    decoders: Collection[str] = (),
    collated: Collection[str] = (),
    sparse_cols: Sequence[str] | None = None,
    handle_invalid: str | Mapping[str, object] = "error",
    keeps_types: bool = False,
    data_name: str = "DataFrame",
    features_name: str = "feature_cols",
) -> DataSchema:
    """Decide how every column is stored, or report what is wrong. Runs on the driver, starts no job.

    Floating columns take the dtype of the model's parameters, integers become int64, booleans uint8;
    `feature_dtypes` and `label_dtypes` override that per column (a mapping by name, or one entry per column,
    None for the default). The validation column (boolean or a number, > 0 means validation) is stored as uint8.

    Args:
        df_schema: the DataFrame's `schema` (classic or Connect).
        feature_cols: columns that become inputs of the model.
        label_cols: columns that become labels; may be empty.
        sample_weight_col: one number per row, or None.
        validation: fraction in [0, 1), name of a column, or None.
        group_col: column of integers or text whose equal values make a group, or None.
        model_dtype: dtype of the model's parameters, for example "float32".
        feature_dtypes: overrides for feature columns.
        label_dtypes: overrides for label columns.
        class_labels: label columns that hold class indices. Spark ML stores these as doubles: a floating scalar becomes
            int64, and materialization rejects fractional numbers.
        decoders: columns whose values a user function converts to numbers or arrays.
        collated: columns whose rows a user function converts to a batch.
        sparse_cols: vector features to keep sparse; None means those of more than `DENSE_WIDTH` dimensions.
        handle_invalid: "error", "skip" (rows with a null or an invalid number), "keep" (NaN and infinity unchanged, a
            null as NaN), or a dict from columns to these words or to a number that replaces nulls and invalid numbers.
            "keep" for all columns applies to the columns of floats.
        keeps_types: store numbers in the types of the source, because a user function receives them before the model.
        data_name: name of the source, for messages.
        features_name: name of the argument `feature_cols`, for messages.

    Raises:
        InvalidArgumentError: a column is missing, ambiguous, of a type that cannot become a tensor, or has two
            roles. The message names the column, its type and the expected types.
    """
    features = _names(feature_cols, features_name)
    labels = _names(label_cols, "label_cols")
    if not features:
        raise InvalidArgumentError(
            f"{features_name} is empty. Name at least one column for the model's input."
        )
    feature_dtype = _overrides(feature_dtypes, features, "feature_dtypes")
    label_dtype = _overrides(label_dtypes, labels, "label_dtypes")
    named = [*features, *labels, *filter(None, (sample_weight_col, group_col))]
    _known("decoders", decoders, [*features, *labels])
    _known("collate_fn", collated, [*features, *labels])
    _known("sparse_cols", sparse_cols or (), features)
    default = dtype_name(model_dtype)
    builder = _Builder(
        fields=_fields_by_name(df_schema),
        data_name=data_name,
        default=default,
        class_labels=class_labels,
        decoders=decoders,
        collated=collated,
        sparse_cols=sparse_cols,
        keeps_types=keeps_types,
        policies=_policies(handle_invalid, named),
        keeps_floats=handle_invalid == "keep",
    )
    columns = tuple(
        builder.feature(n, f"{features_name}[{i}]", feature_dtype.get(n))
        for i, n in enumerate(features)
    )
    targets = tuple(
        builder.label(n, f"label_cols[{i}]", label_dtype.get(n)) for i, n in enumerate(labels)
    )
    weight = split = None
    if sample_weight_col is not None:
        _names([sample_weight_col], "sample_weight_col")
        weight = builder.number(sample_weight_col, "sample_weight_col", default)
    if isinstance(validation, str):
        split = builder.number(validation, "validation", None)
        split = replace(split, dtype="uint8", tensor_dtype="bool", is_explicit=False)
    elif validation is not None:
        check_fraction(validation)
    group = None if group_col is None else builder.group(group_col)
    return DataSchema(columns, targets, weight, split, group)


# Spark types allowed for a group column: their values can be compared and sorted.
_GROUP_TYPES = ("ByteType", "ShortType", "IntegerType", "LongType", "StringType")


@dataclass
class _Builder:
    """Builder of a schema's columns. A column has one role, or is both feature and label.

    Attributes:
        fields: of the source, by name.
        data_name: of the source.
        default: dtype of floats.
        class_labels, decoders, collated, sparse_cols, keeps_types: as passed to `check_schema`.
        policies: for nulls and invalid numbers, by column.
        keeps_floats: True if "keep" was given for all columns: it then applies to the columns that can hold NaN.
        roles: roles of the columns so far, by name.
        features: the feature columns so far.
    """

    fields: Mapping[str, list[AnyField]]
    data_name: str
    default: str
    class_labels: Sequence[str]
    decoders: Collection[str]
    collated: Collection[str]
    sparse_cols: Sequence[str] | None
    keeps_types: bool
    policies: Mapping[str, Policy]
    keeps_floats: bool = False
    roles: dict[str, str] = field(default_factory=dict)
    features: dict[str, Column] = field(default_factory=dict)

    def feature(self, name: str, role: str, override: str | None) -> Column:
        """Build a feature column. Vectors may be sparse."""
        column = self._values(self._field(name, role), name, role, self.default, override)
        if self.sparse_cols is not None:
            column = replace(column, is_sparse=name in self.sparse_cols)
            if column.is_sparse and column.kind != "vector":
                raise InvalidArgumentError(
                    f"sparse_cols names column {name!r} of type {column.source}; only Spark ML vectors can be kept sparse."
                )
        self.features[name] = self._with_policy(column)
        return self.features[name]

    def label(self, name: str, role: str, override: str | None) -> Column:
        """Build a label column. A floating scalar with class indices becomes int64."""
        scalar = "int64" if name in self.class_labels else self.default
        if (feature := self.features.get(name)) is not None:
            return self._shared_label(feature, role, scalar, override)
        column = self._values(self._field(name, role), name, role, scalar, override)
        return self._with_policy(replace(column, is_sparse=False))

    def _shared_label(
        self, feature: Column, role: str, scalar: str, override: str | None
    ) -> Column:
        """Build a label column with the stored values of a feature column."""
        name = feature.name
        field = _field(self.fields, name, role, self.data_name)
        column = self._values(field, name, role, scalar, override)
        if (column.dtype, column.kind) != (feature.dtype, feature.kind) or feature.is_sparse:
            raise InvalidArgumentError(
                f"Column {name!r} is given as {self.roles[name]} and as {role}, which would store it as {feature.dtype} and as {column.dtype}. "
                f'Copy it first, df.withColumn("{name}_2", df["{name}"]), and use the copy for one of the two.'
            )
        return replace(feature, tensor_dtype=column.tensor_dtype, is_explicit=column.is_explicit)

    def number(self, name: str, role: str, override: str | None) -> Column:
        """Build a column of one number per row."""
        floats = (self.default, self.default)
        field = self._field(name, role)
        column = tensor_column(field, role, floats, override)
        if self.keeps_types:
            kept = tensor_column(field, role, floats, None, keeps_type=True)
            column = replace(column, dtype=kept.dtype)
        if column.kind != "scalar":
            raise InvalidArgumentError(
                f"{role} names column {name!r} of type {column.source}. It must hold one number per row."
            )
        return self._with_policy(replace(column, is_sparse=False), role)

    def group(self, name: str) -> Column:
        """Build the column of groups, stored as group numbers."""
        kind = type(self._field(name, "group_col").dataType).__name__
        if kind not in _GROUP_TYPES:
            raise InvalidArgumentError(
                f"group_col names column {name!r} of type {kind}. It must hold integers or text: cast it first."
            )
        return self._with_policy(Column(name, "scalar", "int64", (), kind, "int64"), "group_col")

    def _field(self, name: str, role: str) -> AnyField:
        if name in self.roles:
            raise InvalidArgumentError(
                f"Column {name!r} is given as {self.roles[name]} and as {role}. Every column has one role: "
                f'copy it first, df.withColumn("{name}_2", df["{name}"]), or remove one of the two.'
            )
        self.roles[name] = role
        return _field(self.fields, name, role, self.data_name)

    def _values(
        self, field: AnyField, name: str, role: str, scalar: str, override: str | None
    ) -> Column:
        if name not in self.decoders and name not in self.collated:
            floats = (self.default, scalar)
            return tensor_column(field, role, floats, override, keeps_type=self.keeps_types)
        column = raw_column(field, self.default, override, has_decoder=name in self.decoders)
        return replace(column, is_collated=name in self.collated)

    def _with_policy(self, column: Column, role: str = "") -> Column:
        """Set the policy of a column. `role` is "" for features and labels."""
        policy = self.policies.get(column.name, ("error",))
        if policy[0] == "fill":
            _check_fill(column, policy[1])
        elif policy[0] == "keep" and (problem := _cannot_keep(column, role)):
            if not self.keeps_floats:
                raise InvalidArgumentError(
                    f"handle_invalid keeps NaN in column {column.name!r} of type {column.source}, {problem}"
                )
            policy = ("error",)
        return replace(column, invalid=policy)


def _known(param: str, names: Collection[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            raise InvalidArgumentError(
                f"{param} names column {name!r}, which is not among {listed(map(repr, columns))}."
            )


def _policies(policy: str | Mapping[str, object], columns: Sequence[str]) -> dict[str, Policy]:
    """Check `handle_invalid`, and convert it to a policy per column."""
    is_text = isinstance(policy, str)
    by_name: Mapping[str, object]
    if isinstance(policy, str):
        by_name = dict.fromkeys(columns, policy)
    else:
        _known("handle_invalid", policy, columns)
        by_name = policy
    policies: dict[str, Policy] = {}
    for name, value in by_name.items():
        if isinstance(value, str) and value in ("error", "skip", "keep"):
            policies[name] = (value,)
        elif isinstance(value, (bool, int, float)) and not is_text:
            policies[name] = ("fill", value)
        else:
            raise InvalidArgumentError(
                f"handle_invalid is {policy if is_text else {name: value}!r}. Give 'error', 'skip' (leave out rows with a null, NaN, infinity or a number "
                "that the tensor cannot hold), 'keep' (NaN and infinity unchanged, a null as NaN), or a dict from columns to "
                "these words or to a number that replaces nulls and invalid numbers."
            )
    return policies


def _check_fill(column: Column, value: bool | int | float) -> None:
    """Raise InvalidArgumentError unless the number can replace nulls in the stored column."""
    where = (
        f"handle_invalid fills column {column.name!r} of type {column.source} with {value!r:.50}"
    )
    if column.kind in ("binary", "string"):
        raise InvalidArgumentError(
            f"{where}. Bytes and strings cannot be filled with a number: give 'skip' or 'error', or df.na.fill before."
        )
    if value != value:
        raise InvalidArgumentError(f"{where}, but handle_invalid also replaces NaN. Give a number.")
    if not _holds(column, value):
        raise InvalidArgumentError(
            f"{where}, which {column.tensor_dtype} cannot hold. Give another number, or another type with "
            "feature_dtypes or label_dtypes."
        )


def _cannot_keep(column: Column, role: str) -> str:
    """Explain why a column cannot keep NaN, as the end of a sentence, or return "" if it can."""
    if role:
        return f"which is {role} and needs a number in every row: give 'skip', 'error' or a number."
    if column.kind in ("binary", "string"):
        return "whose bytes and strings are never NaN: give 'skip' or 'error'."
    if not column.holds_nan:
        return (
            f"which is stored as {column.dtype} and so cannot hold NaN. Choose a floating type with feature_dtypes or label_dtypes, "
            "or give 'skip' or a number."
        )
    return ""


def _holds(column: Column, value: bool | int | float) -> bool:
    """Whether the stored type can hold a number other than NaN."""
    if column.tensor_dtype == "bool":
        return value in (0, 1)
    if column.dtype not in FLOATS:
        limits = np.iinfo(column.dtype)
        return limits.min <= value <= limits.max and value == int(value)
    if isinstance(value, float) and math.isinf(value):
        return True
    return abs(value) <= float(np.finfo(column.dtype).max)


def check_fraction(validation: object) -> None:
    """Raise InvalidArgumentError unless `validation` is a number in [0, 1)."""
    if isinstance(validation, bool) or not isinstance(validation, (int, float)):
        raise InvalidArgumentError(
            f"validation is {validation!r:.100}. Give a fraction in [0, 1), the name of a column, or a DataFrame of Spark. "
            "Convert a pandas frame with spark.createDataFrame(frame)."
        )
    if not 0 <= validation < 1:
        raise InvalidArgumentError(
            f"validation is {validation!r}. A fraction must be at least 0 and less than 1, for example 0.1."
        )


def _names(names: object, param: str) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidArgumentError(
            f"{param} is {names!r}. Give a list of column names, for example [{names!r}]."
            if isinstance(names, str)
            else f"{param} is {names!r:.200}. Give a list of column names."
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(
                f"{param} holds {name!r}. Every entry must be a column's name."
            )
    return list(names)


def _fields_by_name(df_schema: AnySchema) -> dict[str, list[AnyField]]:
    by_name: dict[str, list[AnyField]] = {}
    for each in df_schema.fields:
        by_name.setdefault(each.name, []).append(each)
    return by_name


def _field(by_name: Mapping[str, list[AnyField]], name: str, role: str, data_name: str) -> AnyField:
    fields = by_name.get(name)
    if not fields:
        close = difflib.get_close_matches(name, by_name, n=3, cutoff=0.6)
        lower = [n for n in by_name if n.lower() == name.lower() and n not in close]
        hint = (
            f" Did you mean {' or '.join(repr(n) for n in (lower + close)[:3])}?"
            if lower + close
            else ""
        )
        # Spark ML's names, the defaults of TorchClassifier and TorchRegressor.
        if name == "features" and not close:
            hint = (
                " Give feature_cols=[...], or make it: "
                "VectorAssembler(inputCols=[...], outputCol='features')."
            )
        elif name == "label" and not close:
            hint = " Give label_cols=[...]."
        outer = name.partition(".")[0]
        if outer != name and any(hasattr(f.dataType, "fields") for f in by_name.get(outer, [])):
            hint = f" {outer!r} is a struct: select its fields first, df.select('*', '{outer}.*'), and name them alone."
        raise InvalidArgumentError(
            f"{role} names column {name!r}, which the {data_name} does not have.{hint} "
            f"Its columns are: {listed(map(repr, by_name))}."
        )
    if len(fields) > 1:
        raise InvalidArgumentError(
            f"{role} names column {name!r}, which the {data_name} has {len(fields)} times. "
            "Rename or drop the others first, so that the name is unique."
        )
    return fields[0]


def _overrides(dtypes: Dtypes | None, names: list[str], param: str) -> dict[str, str]:
    if dtypes is None:
        return {}
    if dtypes and not names:
        raise InvalidArgumentError(
            f"{param} is {dtypes!r:.200}, and there are no label columns. Labels of a loss that the model computes are features: give "
            "feature_dtypes."
        )
    if isinstance(dtypes, Mapping):
        for name in dtypes:
            if name not in names:
                raise InvalidArgumentError(
                    f"{param} names column {name!r}, which is not among {listed(map(repr, names))}."
                )
        pairs = list(dtypes.items())
    else:
        if isinstance(dtypes, str) or len(dtypes) != len(names):
            raise InvalidArgumentError(
                f"{param} is {dtypes!r:.200}. Give a dict by column name, or a list of {len(names)} entries, one "
                f"for each of {listed(map(repr, names))}."
            )
        pairs = list(zip(names, dtypes, strict=True))
    return {name: dtype_name(dtype) for name, dtype in pairs if dtype is not None}
