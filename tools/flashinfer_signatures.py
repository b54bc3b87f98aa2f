"""Writes which arguments FlashInfer's functions take, for the tests that run its backend without it.

    python -m pip download --no-deps --dest DIR flashinfer-python==0.7.4
    python tools/flashinfer_signatures.py DIR/flashinfer_python-0.7.4-py3-none-any.whl > tests/tp/flashinfer_stand_in/0.7.4.json

Reads the source, of a wheel or of an installed package's directory: nothing is imported, so that no GPU is needed.
"""

import argparse
import ast
import json
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

NAMES = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fused_add_rmsnorm",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_seq_lens",
    "rmsnorm",
    "silu_and_mul",
)
METHODS = ("__init__", "plan", "_plan_impl", "run")
PACKAGE = "flashinfer"

Parameter = dict[str, object]
Read = Callable[[str], str | None]


def signatures(source: Path) -> dict[str, object]:
    """{"version": ..., "signatures": {name or Class.method: parameters}}. Raises SystemExit where a name is not found."""
    read = _wheel(source) if source.is_file() else _directory(source)
    found: dict[str, list[Parameter]] = {}
    exports = _exports(read)
    for name in NAMES:
        node = _defined(read, exports, name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{name}.{method.name}": _parameters(method) for method in _methods(node)}
        else:
            found[name] = _parameters(node)
    return {"version": _version(source, read), "signatures": found}


def _wheel(path: Path) -> Read:
    archive = zipfile.ZipFile(path)
    names = frozenset(archive.namelist())
    return lambda name: archive.read(name).decode() if name in names else None


def _directory(path: Path) -> Read:
    """`path` is the package's own directory."""
    return lambda name: (path.parent / name).read_text() if (path.parent / name).is_file() else None


def _module(read: Read, dotted: str) -> ast.Module | None:
    path = PurePosixPath(*dotted.split("."))
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if (text := read(name)) is not None:
            return ast.parse(text)
    return None


def _exports(read: Read) -> dict[str, str]:
    """Public name -> the module that the package takes it from."""
    root = _module(read, PACKAGE)
    if root is None:
        raise SystemExit(f"no {PACKAGE} there")
    return {
        alias.asname or alias.name: f"{PACKAGE}.{node.module}"
        for node in ast.walk(root)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
    }


def _defined(read: Read, exports: dict[str, str], name: str) -> ast.ClassDef | ast.FunctionDef:
    module = _module(read, exports[name]) if name in exports else None
    nodes = [] if module is None else [n for n in module.body if getattr(n, "name", None) == name]
    plain = [n for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and not _is_overload(n)]
    if not plain:
        raise SystemExit(f"{PACKAGE} exports no {name} that is defined in {exports.get(name, 'any module')}")
    return plain[-1]


def _methods(node: ast.ClassDef) -> Iterable[ast.FunctionDef]:
    functions = (n for n in node.body if isinstance(n, ast.FunctionDef))
    return [n for n in functions if n.name in METHODS and not _is_overload(n)]


def _is_overload(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)


def _parameters(node: ast.FunctionDef) -> list[Parameter]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    found = [_parameter(a, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(positional, defaults, strict=True)]
    if args.vararg is not None:
        found.append(_parameter(args.vararg, "VAR_POSITIONAL", None))
    found += [_parameter(a, "KEYWORD_ONLY", d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        found.append(_parameter(args.kwarg, "VAR_KEYWORD", None))
    return found


def _parameter(arg: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    shape: Parameter = {"name": arg.arg, "kind": kind}
    if default is not None:
        shape["default"] = ast.literal_eval(default) if _is_literal(default) else ast.unparse(default)
    return shape


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _version(source: Path, read: Read) -> str:
    meta = _module(read, f"{PACKAGE}._build_meta")
    assigned = [n for n in (meta.body if meta else ()) if isinstance(n, ast.Assign)]
    for node in assigned:
        if any(isinstance(t, ast.Name) and t.id == "__version__" for t in node.targets):
            return str(ast.literal_eval(node.value))
    raise SystemExit(f"{source} does not say its version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a wheel, or the directory of an installed flashinfer package")
    print(json.dumps(signatures(parser.parse_args().source), indent=1))


if __name__ == "__main__":
    main()
