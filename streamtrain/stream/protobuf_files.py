"""Where the files of Protobuf types come from: disk, a registry, this package."""

import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from streamtrain.errors import ConfigError
from streamtrain.stream.protobuf_schema import NotASchema, ProtobufFile

# Files that registries do not keep, because the packages of every language have them.
_WELL_KNOWN = re.compile(r"google/(protobuf|type)/\w+\.proto|confluent/(type/)?\w+\.proto")
_HOW = "`protoc --include_imports --descriptor_set_out=FILE`"


def default_file() -> ProtobufFile:
    """The types of schemas/sample.proto."""
    import streamtrain.stream.sample_pb2 as types

    return ProtobufFile([types.DESCRIPTOR.serialized_pb])


def from_path(path: Path) -> ProtobufFile:
    """The types of a file on disk.

    Args:
        path: a .proto, for which grpcio-tools must be installed, or by any other name a descriptor set.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    try:
        if path.suffix != ".proto":
            return _of_set(path.read_bytes())
        path = path.resolve(strict=True)
        return _of_set(_compiled(path.parent, path))
    except OSError as exc:
        raise ConfigError(f"schema file {path} cannot be read: {exc.strerror}") from exc
    except (DecodeError, NotASchema) as exc:
        raise ConfigError(
            f"schema file {path} is not a Protobuf schema: {exc}. It must be a .proto, or a descriptor set, "
            f"which {_HOW} writes"
        ) from exc


def from_texts(texts: Mapping[str, str]) -> ProtobufFile:
    """The types of files as a registry has them.

    Args:
        texts: the files by name, each after those that it imports; the last is meant. Either all are base64 of a
            FileDescriptorProto, or all are text, for which grpcio-tools must be installed.

    Raises:
        ConfigError: grpcio-tools are missing.
        NotASchema: they are no such files.
    """
    files: dict[str, bytes] = {}
    try:
        for name, text in texts.items():
            file = descriptor_pb2.FileDescriptorProto.FromString(b64decode(text, validate=True))
            file.name = name
            for other in file.dependency:
                _add_well_known(other, files)
            files[name] = file.SerializeToString()
    except DecodeError as exc:
        raise NotASchema(str(exc)) from exc
    except ValueError as exc:
        if isinstance(exc, NotASchema):
            raise
        return _of_texts(texts)  # some registries have only the form in which a schema came to them
    return ProtobufFile(list(files.values()))


def _of_texts(texts: Mapping[str, str]) -> ProtobufFile:
    with TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for name, text in texts.items():
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise NotASchema(f"{name} is no name of a file")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return _of_set(_compiled(root, path))


def _of_set(data: bytes) -> ProtobufFile:
    files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    return ProtobufFile([one.SerializeToString() for one in files])


def _compiled(root: Path, path: Path) -> bytes:
    """The descriptor set of a .proto that imports from a directory."""
    if find_spec("grpc_tools") is None:
        raise ConfigError(f"to read a .proto: pip install grpcio-tools; or give schema_file what {_HOW} writes")
    with TemporaryDirectory() as directory:
        out = Path(directory) / "set"
        options = [f"-I{root}", "--include_imports", f"--descriptor_set_out={out}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *options, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotASchema(done.stderr.strip().replace(f"{root}/", ""))
        return out.read_bytes()


def _add_well_known(name: str, files: dict[str, bytes]) -> None:
    """Adds a file and what it imports from those that are installed, if it is not there yet."""
    if name in files:
        return
    if not _WELL_KNOWN.fullmatch(name):
        raise NotASchema(f"it imports {name}, which the registry does not have")
    package = "confluent_kafka.schema_registry." if name.startswith("confluent/") else ""
    try:
        file: Any = import_module(package + name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR
    except ImportError as exc:
        raise NotASchema(f"it imports {name}: {exc}") from exc
    for other in file.dependencies:
        _add_well_known(other.name, files)
    files[name] = file.serialized_pb
