"""JSON Schemas in the dialect of the matcher, which refuses what it cannot do instead of ignoring it.

Keywords that it lacks are rewritten into those it has wherever that is exact, or leaves only a part of the
valid documents. What remains is refused by name. (The other common matcher, xgrammar, is no way out: see
docs/design.md.)
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator

from sgla.grammar.errors import GrammarError
from sgla.grammar.logic import (
    ANNOTATIONS,
    Find,
    Json,
    Object,
    apart,
    differing,
    few_values,
    kinds,
    listed,
    matches,
    parts,
    same,
    together,
)
from sgla.grammar.patterns import selecting, texts
from sgla.grammar.references import all_of, children, mapped, settle

COUNTS = (
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
)
IN_PLACE = ("$dynamicRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf")
# Keywords that the matcher lacks, or has in part.
HARD = frozenset(
    [
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "maxProperties"),
        *("minProperties", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    ]
)
TYPES = ("array", "boolean", "null", "number", "object", "string")
ANYTHING: tuple[Json, ...] = (True, {})

# Formats of OpenAPI and of schema generators that say what a value means, not what it looks like.
MEANINGS = frozenset(
    [
        "base64url",
        "binary",
        "byte",
        "color",
        "decimal",
        "directory-path",
        "double",
        "file-path",
        "float",
        "json",
        "json-string",
        "new-path",
        "password",
        "path",
        "phone",
    ]
)
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
BOUNDS = {name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in BITS.items()} | {
    f"u{name}": (0, 2**bits - 1) for name, bits in BITS.items()
}
FAR = 2**31  # characters, items or properties that no answer has
LARGEST = 2**63 - 1024  # integer that the matcher takes as a bound; it computes them as float64
# A narrower format that exists, for one that does not.
NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
_CHAR = r"([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
# RFC 3986: without a scheme, the first segment has no colon; behind a slash it is not empty.
_PATH = rf"(/|/?{_CHAR.replace(':', '')}+(/{_CHAR}*)*)?"
RELATIVE = rf"^{_PATH}(\?({_CHAR}|[/?])*)?(#({_CHAR}|[/?])*)?$"
# RFC 6570, of ASCII characters.
_LITERAL = r"([!#$&(-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2})"
_VARIABLE = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(:[1-9][0-9]{0,3}|\*)?"
TEMPLATE = rf"^({_LITERAL}|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$"
# RFC 3339, of which the matcher's dates have a 29 February in every year,
# and its times a leap second in every minute.
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOUR}:[0-5][0-9])"
# RFC 1123, without labels that have -- at their third place: most of those with xn-- encode nothing.
_LETTER, _INNER = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL = (
    f"{_LETTER}({_LETTER}|{_INNER}{_LETTER}({_INNER}{{0,59}}{_LETTER})?"
    f"|{_INNER}-{_LETTER}({_INNER}{{0,58}}{_LETTER})?)?"
)
# Regular expressions that every dialect has, without groups in groups.
_ATOM = (
    r"([^\\^$.|?*+()\[\]{}\x00-\x1f]|\.|\\[dDwWsS\\^$.|?*+()\[\]{}/nrt-]"
    r"|\[\^?([A-Za-z0-9_ .,:;/@%]|a-z|A-Z|0-9|\\[dws.-])+\])"
)
_TIMES = r"([*+?]|\{[0-9]{1,2}\})?"
EXPRESSION = rf"^\^?({_ATOM}{_TIMES}|\((\?:)?({_ATOM}{_TIMES}|\|)*\){_TIMES}|\|)*\$?$"
PATTERNS: dict[str, Json] = {
    "email": {"pattern": r"^[^@]{1,64}@([^@.]{1,63}\.)*[^@.]{1,63}$"},
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(\.{_LABEL})*$"},
    "json-pointer": {"pattern": "^(/([^/~]|~[01])*)*$"},
    "regex": {"pattern": EXPRESSION},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"},
    "uri-template": {"pattern": TEMPLATE},
    "uri-reference": {"anyOf": [{"format": "uri"}, {"pattern": RELATIVE}]},
    "iri-reference": {"anyOf": [{"format": "uri"}, {"pattern": RELATIVE}]},
}
# Formats that the matcher has itself.
OWN = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
FORMATS = MEANINGS | OWN | BOUNDS.keys() | NARROWER.keys() | PATTERNS.keys()
LISTED = 64  # values of which sets are made
SETS = 1024  # arrays that a set of listed values may be
EVERY = frozenset([".*$", "$", r"^[\s\S]*$"])  # patterns that every name matches
ONE_CLASS = re.compile(
    r"\^(\[[^\[\]\\]*(?:\\.[^\[\]\\]*)*\]|\\[wd])([*+])\$"
)  # strings of one kind of characters
ODD = r"^$|[\n\r\u2028\u2029]"  # what ``NEARLY`` does not match
NEARLY = frozenset([".+", "^.+", ".+$", "^.*$", "^.+$", "^(.*)$", "^(.+)$"])
GROUP = 4  # patterns that are parted from each other
SCHEMAS = 50_000  # that a schema may become
BRANCHES = 32  # of a oneOf
PLACES = 8  # of an array
FEW = 32  # sets of properties
LENGTH = 50_000  # characters that a branch may become
WAYS = 64  # in which a branch of a oneOf may differ from the others


def adapt(schema: Json, find: Find | None = None) -> Json:
    """An equivalent schema that the matcher can honour, as far as there is one. Raises GrammarError.

    ``find`` resolves references; None: ``schema`` is the whole document.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object or a boolean, got {json.dumps(schema)[:40]}")
    if find is None:
        schema = settle(schema)
        find = Find(schema)
    find.schemas += 1
    if find.schemas > SCHEMAS:
        raise GrammarError(
            f"the JSON schema has more than {SCHEMAS} parts when its oneOf, "
            "not, if and patternProperties are written out",
            unsupported=True,
        )
    some = _listed(schema, find)
    if some is not None:
        return some
    names = schema.get("propertyNames")
    if isinstance(names, dict) and set(names) == {"$ref"}:
        schema = schema | {"propertyNames": find(names["$ref"]) or names}
    out = mapped(schema, lambda item: adapt(item, find))
    out = {key: _counted(key, value) for key, value in out.items()}
    for rule in RULES:
        rule(out)
    for exact in EXACT:
        exact(out, schema, find)
    return out


def _listed(schema: Object, find: Find) -> Json:
    """The listed values that fit,
    where values are listed beside keywords that the matcher lacks; None: not so."""
    found = list(parts(schema, find))
    values = listed(found)
    if values is None or not any(HARD & set(part) for part in found):
        return None
    fits = find.validator(schema)
    if fits is None:
        return None
    kept = {key: value for key, value in schema.items() if key in ANNOTATIONS}
    return mapped(kept, lambda item: adapt(item, find)) | {"enum": [value for value in values if fits(value)]}


def object_schema(schema: Json) -> Object:
    """The same as an object. Raises GrammarError for the schema that nothing fits."""
    if schema is False:
        raise GrammarError("no document fits the schema false")
    return {} if schema is True else schema


def open_beside(schema: Json) -> bool:
    """Whether an object may have further properties beside those with a schema of their own."""
    if not isinstance(schema, dict):
        return False
    known = bool(schema.get("properties") or schema.get("patternProperties"))
    if known and schema.get("additionalProperties", True) is not False:
        return True
    return any(open_beside(item) for _, item in children(schema))


def escapes(schema: Json) -> Object:
    """Options of the matcher, which spells names that are not declared with any escape of JSON, so that one
    may be a declared name in disguise: then there are only the escapes that a character needs. Raises
    GrammarError where a listed value has others."""
    if not open_beside(schema):
        return {}
    if re.search(r"[\x00-\x07\x0b\x0e-\x1f]", "".join(_strings(schema))):
        raise GrammarError(
            "control characters are not supported beside properties that are not declared", True
        )
    return {"json_allowed_escapes": 'nrbtf\\"'}


def _strings(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _strings(each)


def uncounted(
    schema: Json, path: str = "", needed: frozenset[str] = frozenset(), closed: bool = False
) -> str | None:
    """JSON pointer of the first ``minProperties`` for which a name that comes twice might count twice; None
    if there is none. ``needed`` and ``closed``: what holds around it for the same document."""
    if not isinstance(schema, dict):
        return None
    for part in _same_document(schema):
        needed |= frozenset(part.get("required", ()))
        closed |= part.get("additionalProperties") is False and not part.get("patternProperties")
    if schema.get("minProperties", 0) - len(needed) > 1 and not closed:
        return path or "/"
    for step, item in children(schema):
        beside = step.split("/")[0] in ("allOf", "anyOf", "oneOf")
        found = uncounted(item, f"{path}/{step}", *((needed, closed) if beside else ()))
        if found is not None:
            return found
    return None


def _same_document(schema: Json) -> Iterator[Object]:
    if isinstance(schema, dict):
        yield schema
        for part in schema.get("allOf", ()):
            yield from _same_document(part)


def _counted(key: str, value: Json) -> Json:
    return int(value) if key in COUNTS and isinstance(value, float) and value.is_integer() else value


def where(schema: Json, keyword: str, path: str = "", value: Json = None) -> str | None:
    """JSON pointer of the first schema that has ``keyword``, with ``value`` if that is given;
    None if none has."""
    if not isinstance(schema, dict):
        return None
    if keyword in schema and value in (None, schema[keyword]):
        return path or "/"
    for step, item in children(schema):
        found = where(item, keyword, f"{path}/{step}", value)
        if found is not None:
            return found
    return None


def _also(schema: Object, *more: Json) -> None:
    """Every one of ``more`` must hold, too."""
    schema["allOf"] = [*schema.get("allOf", []), *more]


def either(patterns: list[str]) -> str:
    return patterns[0] if len(patterns) == 1 else "|".join(f"(?:{pattern})" for pattern in patterns)


def _is_object(schema: Object) -> bool:
    return schema.get("type") in ("object", ["object"])


def _absent(*names: str) -> Object:
    return {"properties": dict.fromkeys(names, False)}


# Rules: each changes the schema in place or leaves it alone. Subschemas are done. ---------------------------


def _drop_idle(schema: Object) -> None:
    """Keywords that forbid nothing."""
    for key in COUNTS:
        count = schema.get(key)
        if isinstance(count, int) and count > FAR:
            schema[key] = FAR
            if key.startswith("max"):
                del schema[key]
    if "if" in schema and not ("then" in schema or "else" in schema):
        del schema["if"]
    if "if" not in schema:
        _drop(schema, "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    few = schema.get("maxItems", 2)
    if schema.get("uniqueItems") is False or (isinstance(few, int) and few <= 1):
        _drop(schema, "uniqueItems")
    for key in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if key in schema and schema[key] in ANYTHING:
            del schema[key]
    if schema.get("propertyNames") == {"type": "string"}:
        del schema["propertyNames"]
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        if schema.get(key) == {}:
            del schema[key]
    if schema.get("not") is False:
        del schema["not"]


def _drop(schema: Object, *keys: str) -> None:
    for key in keys:
        schema.pop(key, None)


def _close(schema: Object) -> None:
    """Nothing beside these keywords evaluates anything: unevaluated is what is additional."""
    if any(key in schema for key in IN_PLACE):
        return
    for unevaluated, additional in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "additionalItems" if isinstance(schema.get("items"), list) else "items"),
    ):
        if unevaluated in schema and not (unevaluated == "unevaluatedItems" and "contains" in schema):
            value = schema.pop(unevaluated)
            schema.setdefault(additional, value)


def _split_dependencies(schema: Object) -> None:
    """Draft 7's form of two keywords."""
    dependencies = schema.pop("dependencies", None)
    if not isinstance(dependencies, dict):
        return
    for name, value in dependencies.items():
        key = "dependentRequired" if isinstance(value, list) else "dependentSchemas"
        schema[key] = schema.get(key, {}) | {name: value}


def _depend(schema: Object) -> None:
    """The property is absent, or what depends on it holds."""
    if "$ref" in schema:
        return
    required = schema.get("required", [])
    for name, others in schema.pop("dependentRequired", {}).items():
        if name in required:
            schema["required"] = required = list(dict.fromkeys([*required, *others]))
        elif others:
            _also(schema, {"anyOf": [_absent(name), {"required": list(dict.fromkeys([name, *others]))}]})
    for name, then in schema.pop("dependentSchemas", {}).items():
        if name in required:
            _also(schema, then)
        else:
            _also(schema, {"anyOf": [_absent(name), {"allOf": [{"required": [name]}, then]}]})


def _decide(schema: Object) -> None:
    """``if`` on one property whose values can be listed becomes a choice between two branches."""
    condition = schema.get("if")
    if condition in ANYTHING or condition is False:
        branch = schema.get("then" if condition is not False else "else", True)
        _drop(schema, "if", "then", "else")
        return _also(schema, branch)
    test = _test_of(condition) if isinstance(condition, dict) and _is_object(schema) else None
    if test is None or "$ref" in schema:
        return
    name, hits, absent_hits = test
    listed = _values(schema.get("properties", {}).get(name))
    if listed is None:
        return
    hits, misses = [v for v in listed if v in hits], [v for v in listed if v not in hits]
    then, other = schema.get("then", True), schema.get("else", True)
    branches = [_branch(name, hits, then), _branch(name, misses, other)]
    if name not in schema.get("required", []):
        branches.append({"allOf": [_absent(name), then if absent_hits else other]})
    _drop(schema, "if", "then", "else")
    _also(schema, {"anyOf": [branch for branch in branches if branch is not None]})


def _test_of(condition: Object) -> tuple[str, list[Json], bool] | None:
    """Of ``{"properties": {name: const or enum}}``:
    the name, the values, and whether a document without it passes."""
    properties = condition.get("properties")
    if set(condition) - {"properties", "required", "type"} or not isinstance(properties, dict):
        return None
    if len(properties) != 1 or condition.get("type", "object") != "object":
        return None
    ((name, value),) = properties.items()
    values = _values(value)
    required = condition.get("required", [])
    if values is None or len(value) != 1 or required not in ([], [name]):
        return None
    return name, values, not required


def _values(schema: Json) -> list[Json] | None:
    """The values that a schema lists; None if it does not.
    Numbers are left out: 1 is 1.0, and True in Python."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if schema.get("type") == "boolean" and values is None:
        return [True, False]
    if isinstance(values, list) and all(isinstance(v, (str, bool)) or v is None for v in values):
        return values
    return None


def _branch(name: str, values: list[Json], rest: Json) -> Object | None:
    if not values or rest is False:
        return None
    return {"allOf": [{"required": [name], "properties": {name: {"enum": values}}}, rest]}


def _name_properties(schema: Object) -> None:
    """``propertyNames`` with a list of names, a pattern or lengths,
    where nothing else says which names there may be."""
    names, more = schema.get("propertyNames"), schema.get("additionalProperties", True)
    if not isinstance(names, dict) or "$ref" in schema:
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    values, pattern = _values(names), _pattern_of(names)
    if pattern is not None and any(matches(pattern, name) is None for name in known):
        return
    if values is not None and not set(names) - {"const", "enum", "type"} - ANNOTATIONS and not patterns:
        allowed = {name: known.get(name, more) for name in values if isinstance(name, str)}
        schema["properties"] = allowed | {name: False for name in known if name not in allowed}
    elif pattern is None or not (more in ANYTHING or more is False or not known):
        return
    elif not patterns and more is not False:
        schema["patternProperties"] = {pattern: more}
    elif len(patterns) == 1 and (
        pattern in patterns or (patterns.keys() <= NEARLY and not together(pattern, ODD))
    ):
        schema["patternProperties"] = dict.fromkeys([pattern], *patterns.values())
    elif patterns:
        parted = {selecting((pattern, other)): each for other, each in patterns.items()}
        if more is not False:
            parted[selecting((pattern,), tuple(patterns))] = more
        if None in parted:
            return
        schema["patternProperties"] = parted
    if pattern is not None:
        schema["properties"] = known | {name: False for name in known if not matches(pattern, name)}
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _pattern_of(names: Json) -> str | None:
    """The pattern that says the same about strings; None if there is none."""
    if not isinstance(names, dict) or not _may_be(names, "string"):
        return None
    keys = set(names) - {"type"} - ANNOTATIONS
    if keys == {"allOf"} and len(names["allOf"]) == 1:
        return _pattern_of(names["allOf"][0])
    if keys == {"anyOf"}:
        found = [
            _pattern_of(each)
            for each in names["anyOf"]
            if not isinstance(each, dict) or _may_be(each, "string")
        ]
        patterns = [pattern for pattern in found if pattern is not None]
        return either(patterns) if patterns and len(patterns) == len(found) else None
    lengths = f"{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}"
    if keys == {"pattern"}:
        return str(names["pattern"])
    if keys and keys <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{lengths}$"
    if (
        keys
        and keys <= {"minLength", "maxLength", "pattern"}
        and (of := ONE_CLASS.fullmatch(str(names["pattern"])))
    ):
        least = max(names.get("minLength", 0), 1 if of[2] == "+" else 0)
        return f"^{of[1]}{{{least},{names.get('maxLength', '')}}}$"
    return None


def _list_names(schema: Object) -> None:
    """Patterns that few names match become these names:
    the matcher cannot tell when there are no more of them."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    properties = dict(schema.get("properties", {}))
    for pattern, each in patterns.items():
        for name in texts(pattern) or ():
            properties[name] = all_of([properties[name], each] if name in properties else [each])
    schema["properties"] = properties
    schema["patternProperties"] = {
        pattern: each for pattern, each in patterns.items() if texts(pattern) is None
    }
    if not schema["patternProperties"]:
        del schema["patternProperties"]


def _may_be(schema: Object, kind: str) -> bool:
    types = schema.get("type", kind)
    return kind in ([types] if isinstance(types, str) else types)


def _choose_one(schema: Object) -> None:
    """``oneOf`` of single required properties: with one of them, the others are absent."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not branches or "anyOf" in schema:
        return
    if len(branches) == 1:
        return _also(schema, schema.pop("oneOf")[0])
    if not all(isinstance(b, dict) and set(b) == {"required"} and len(b["required"]) == 1 for b in branches):
        return
    names = [b["required"][0] for b in branches]
    if len(set(names)) == len(names) and _is_object(schema):
        del schema["oneOf"]
        schema["anyOf"] = [{"required": [n]} | _absent(*(o for o in names if o != n)) for n in names]


def _know_formats(schema: Object) -> None:
    """A format that nobody knows is an annotation (JSON Schema 2020-12 Validation, 7.2.1)."""
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name in NARROWER:
        name = schema["format"] = NARROWER[name]
    elif name not in OWN:
        del schema["format"]
    if name in BOUNDS:
        low, high = BOUNDS[name]
        bounds = {"minimum": low, "maximum": high}
        _limit(bounds)
        _also(schema, bounds)
    elif name in PATTERNS:
        _also(schema, PATTERNS[name])


def _limit(schema: Object) -> None:
    """Bounds that the matcher cannot compute move inwards."""
    for key, up in (
        ("minimum", True),
        ("exclusiveMinimum", True),
        ("maximum", False),
        ("exclusiveMaximum", False),
    ):
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if isinstance(value, int) and (near := float(value)) != value and (near < value) == up:
            value = int(math.nextafter(near, math.inf if up else -math.inf))
        schema[key] = max(value, -LARGEST) if up else min(value, LARGEST)


def _count(schema: Object) -> None:
    """Numbers of properties:
    the matcher counts only those that are not declared, so a choice says which declared ones there are."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return
    optional = [name for name, each in properties.items() if each is not False and name not in required]
    needed = len(set(required))
    least, most = schema.get("minProperties", 0) - needed, schema.get("maxProperties", math.inf) - needed
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    if least <= 0:
        _drop(schema, "minProperties")
    if closed and most >= len(optional):
        _drop(schema, "maxProperties")
    if not {"minProperties", "maxProperties"} & set(schema) or not optional or most < max(least, 0):
        return
    size, exactly = len(optional), {"inside": True, "outside": True}
    bounds = {key: schema[key] for key in ("minProperties", "maxProperties") if key in schema}
    if not closed and 2**size <= FEW:
        some = [each | bounds for each in _sets(optional, range(max(0, least - 1), size + 1), **exactly)]
        _drop(schema, *(bounds if some else ()))
        return _also(schema, {"anyOf": some}) if some else None
    if least <= 0:
        sizes, sides = [int(min(most, size))], {"outside": True}
    elif most >= size:
        sizes, sides = [least], {"inside": True}
    else:
        sizes, sides = list(range(least, int(min(most, size)) + 1)), exactly
    if sum(math.comb(size, each) for each in sizes) > WAYS:
        return
    found = _sets(optional, sizes, **sides)
    if not closed:  # others are either left out, or alone
        if most < math.inf:
            known = dict.fromkeys(properties, True)
            found = [each | {"properties": known | each.get("properties", {})} for each in found]
            found = [each | {"additionalProperties": False} for each in found]
        found += [_absent(*optional) | bounds] * (least <= 1)
    _drop(schema, *bounds)
    _also(schema, {"anyOf": found})


def _sets(
    names: list[str], sizes: Iterable[int], inside: bool = False, outside: bool = False
) -> list[Object]:
    """For each set of ``names`` of one of these ``sizes``:
    those ``inside`` of it are required, those ``outside`` are absent."""
    return [
        ({"required": list(some)} if inside else {})
        | (_absent(*(name for name in names if name not in some)) if outside else {})
        for size in sizes
        for some in itertools.combinations(names, size)
    ]


def _matches_everything(pattern: str) -> bool:
    """It matches the empty string, and does not look at what comes behind a match."""
    return not re.search(r"\$|\\[bBzZ]|\(\?", pattern) and matches(pattern, "") is True


def _apart(group: list[str], schemas: Object) -> Object | None:
    """A pattern for the names that match some of ``group`` and not the others, for each of these
    choices; None if they cannot be told."""
    found: Object = {}
    for size in range(1, len(group) + 1) if len(group) <= GROUP else ():
        for some in itertools.combinations(group, size):
            pattern = selecting(some, tuple(name for name in group if name not in some))
            if pattern is None:
                return None
            if texts(pattern) != []:
                found[pattern] = all_of([schemas[name] for name in some])
    return found


def _part_patterns(schema: Object) -> None:
    """``patternProperties`` that names may match several of: the matcher wants them apart. One that every
    name matches is what is additional; others become one that asks for all of them."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    whole = EVERY | NEARLY if schema.get("additionalProperties", True) in ANYTHING else EVERY
    every = [each for name, each in patterns.items() if name in whole or _matches_everything(name)]
    some = {
        name: each for name, each in patterns.items() if name not in whole and not _matches_everything(name)
    }
    if not every and (len(patterns) < 2 or together(*patterns) == ""):
        return
    if every:
        some = {name: all_of([each, *every]) for name, each in some.items()}
        properties = schema.get("properties", {})
        schema["properties"] = {name: all_of([each, *every]) for name, each in properties.items()}
        schema["additionalProperties"] = all_of(every)
    groups: list[list[str]] = []
    for name in some:
        near = [group for group in groups if any(together(name, other) for other in group)]
        groups = [group for group in groups if group not in near] + [[*itertools.chain(*near), name]]
    schema["patternProperties"] = {}
    for group in groups:
        schema["patternProperties"] |= _apart(group, some) or {
            either(group): all_of([some[name] for name in group])
        }
    if not groups:
        del schema["patternProperties"]


RULES: tuple[Callable[[Object], None], ...] = (
    _drop_idle,
    _close,
    _split_dependencies,
    _depend,
    _decide,
    _part_patterns,
    _name_properties,
    _list_names,
    _choose_one,
    _know_formats,
    _limit,
    _count,
)


# The same by logic: these see the schema as it was, too, and find what it refers to. ------------------------


def _negate_exactly(schema: Object, given: Object, find: Find) -> None:
    if "not" not in schema:
        return
    wrongs = differing(_but(given, "not"), given["not"], find)
    if wrongs is not None:
        del schema["not"]
        _also(schema, _one_of_these([adapt(wrong, find) for wrong in wrongs]))


def _but(schema: Object, *keys: str) -> Object:
    return {key: value for key, value in schema.items() if key not in keys}


def _one_of_these(schemas: list[Json]) -> Json:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas or [False]}


def _decide_exactly(schema: Object, given: Object, find: Find) -> None:
    """Either the condition and ``then``, or the opposite of the condition and ``else``;
    or both, whatever the condition says."""
    if "if" not in schema:
        return
    wrongs = differing(_but(given, "if", "then", "else"), given["if"], find)
    if wrongs is None and given.get("then") is False:
        return
    condition, then, other = schema.pop("if"), schema.pop("then", True), schema.pop("else", True)
    branches: list[Json] = [] if then is False else [{"allOf": [condition, then]}]
    if wrongs is None and other is not False:
        branches = [{"allOf": [then, other]}]
    elif other is not False:
        branches += [{"allOf": [adapt(wrong, find), other]} for wrong in wrongs or ()]
    _also(schema, _one_of_these(branches))


def _choose_exactly(schema: Object, given: Object, find: Find) -> None:
    """One branch and the opposites of those that it is not apart from."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list):
        return
    if len(branches) > BRANCHES:
        schema["oneOf"] = given["oneOf"]
        return
    around = _but(given, "oneOf")
    found: list[Json] = []
    for i, branch in enumerate(branches):
        own = {"allOf": [given["oneOf"][i], around]}
        others = [other for j, other in enumerate(given["oneOf"]) if j != i and not apart(own, other, find)]
        ways = [differing(own, other, find) for other in others]
        if None in ways:
            schema["oneOf"] = given[
                "oneOf"
            ]  # where the matcher can tell them apart, they must be what they were
            return
        most = min(WAYS, max(1, LENGTH // len(json.dumps(branch))))
        while math.prod(map(len, filter(None, ways))) > most:
            longest = max(ways, key=lambda some: len(some or ()))
            del (longest or [])[len(longest or ()) // 2 :]
        if all(ways):
            needs = [_one_of_these([adapt(way, find) for way in some or ()]) for some in ways]
            found.append({"allOf": [branch, *needs]} if needs else branch)
    del schema["oneOf"]
    if "anyOf" in schema:
        _also(schema, {"anyOf": found or [False]})
    else:
        schema["anyOf"] = found or [False]


def _list_sets(schema: Object, given: Object, find: Find) -> None:
    """``uniqueItems`` of items with few values: all arrays that there may be, in any order if these are not
    too many, else each set at least in the order of the list."""
    items = given.get("items")
    if "array" not in kinds([given]):
        _drop(schema, "uniqueItems")
    if (
        schema.get("uniqueItems") is not True
        or {"contains", "prefixItems"} & set(schema)
        or not isinstance(items, dict)
    ):
        return
    some = few_values(items, find)
    fits = None if some is None or len(some) > LISTED else find.validator(items)
    if some is None or fits is None:
        return
    values: list[Json] = []
    for value in filter(fits, some):
        if not any(same(value, other) for other in values):
            values.append(value)
    lengths = range(schema.get("minItems", 0), min(schema.get("maxItems", LISTED), len(values)) + 1)
    ordered = {size: math.comb(len(values), size) for size in lengths}
    total = sum(ordered.values())
    if total > SETS:
        return
    arrays: list[Json] = []
    for size in lengths:
        more = math.perm(len(values), size) - ordered[size]
        any_order = total + more <= SETS
        total += more if any_order else 0
        arrays += map(list, (itertools.permutations if any_order else itertools.combinations)(values, size))
    _drop(schema, "uniqueItems", "items", "minItems", "maxItems")
    others = sorted(kinds([given]) - {"array"})
    _also(schema, {"anyOf": [{"enum": arrays}, {"type": others}]} if others else {"enum": arrays})


def _contain(schema: Object, given: Object, find: Find) -> None:
    """The items that ``contains`` asks for stand side by side, among the first ``PLACES``."""
    least = schema.get("minContains", 1)
    if "contains" not in schema or "maxContains" in schema or not 0 < least <= PLACES:
        return
    item = schema.pop("contains")
    _drop(schema, "minContains")
    last = min(schema.get("maxItems", PLACES), PLACES) - least
    key = "items" if find.lists else "prefixItems"
    ways = [{key: [True] * i + [item] * least, "minItems": i + least} for i in range(last + 1)]
    _also(schema, _one_of_these(ways))


EXACT: tuple[Callable[[Object, Object, Find], None], ...] = (
    _negate_exactly,
    _decide_exactly,
    _choose_exactly,
    _list_sets,
    _contain,
)
