"""The pydantic base of everything a user declares: frozen, hashable, no unknown fields, errors as :class:`SpecError`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from attngen.errors import SpecError


class SpecModel(BaseModel):
    """A frozen model, made from its fields by name or, in the order of ``positional``, by position."""

    positional: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def __init__(self, *values: Any, **fields: Any) -> None:
        named = dict(zip(self.positional, values, strict=False))
        if len(values) > len(self.positional) or named.keys() & fields.keys():
            raise SpecError(
                f"{type(self).__name__} is given {len(values)} values by position",
                where=type(self).__name__,
                why=f"by position it takes {', '.join(self.positional) or 'none'}, each once",
                fix="pass fields by name",
            )
        try:
            super().__init__(**named, **fields)
        except ValidationError as error:
            raise _spec_error(type(self).__name__, error) from None

    def __eq__(self, other: object) -> bool:
        """Equal fields of the same class; run-time defaults of captured tensors do not count."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _spec_error(cls.__name__, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise _spec_error(cls.__name__, error) from None


def _spec_error(model: str, error: ValidationError) -> SpecError:
    first, *more = error.errors(include_url=False)
    path = ".".join([model, *(str(part) for part in first["loc"])])
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, SpecError):
        nested = inner.where.partition(".")[2]
        return SpecError(
            f"{model} is not valid",
            where=f"{path}.{nested}" if nested else path,
            why=inner.why if nested else f"{inner.what}: {inner.why}",
            fix=inner.fix,
        )
    shown = repr(first.get("input"))
    why = f"{first['msg']} (got {shown if len(shown) <= 80 else shown[:77] + '...'})"
    if more:
        why += f"; and {len(more)} more"
    return SpecError(f"{model} is not valid", where=path, why=why, fix="correct the field")
