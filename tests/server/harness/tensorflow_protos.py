"""The stubs of the package tensorflow-serving-api, without TensorFlow, whose modules `tensorflow.*_pb2` they import.

ovmsclient contains the same protos under names of its own, so its descriptors are renamed to TensorFlow's. If TensorFlow
is installed, its own modules are used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass

_THEIRS = "ovmsclient.tfs_compat.protos"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] != "tensorflow":
            return None
        is_package = not fullname.endswith("_pb2")
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec):
        return types.ModuleType(spec.name)

    def exec_module(self, module):
        if module.__name__.endswith("_pb2"):
            file = _registered(importlib.import_module(f"{_THEIRS}.{module.__name__}").DESCRIPTOR)
            module.__dict__["DESCRIPTOR"] = file
            module.__dict__.update((name, GetMessageClass(it)) for name, it in file.message_types_by_name.items())
            values = [value for enum in file.enum_types_by_name.values() for value in enum.values]
            module.__dict__.update((value.name, value.number) for value in values)
            # TensorFlow has moved the contents of error_codes.proto since, and the stubs look for the module of the new file
            module.__dict__["xla_dot_tsl_dot_protobuf_dot_error__codes__pb2"] = module


def _registered(theirs: FileDescriptor) -> FileDescriptor:
    """The file with TensorFlow's names, in the pool that all stubs share."""
    if theirs.package.startswith("google."):
        return theirs
    for needed in theirs.dependencies:
        _registered(needed)
    pool, file = descriptor_pool.Default(), _renamed(theirs)
    try:
        return pool.FindFileByName(file.name)
    except KeyError:
        return pool.AddSerializedFile(file.SerializeToString())


def _renamed(theirs: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    theirs.CopyToProto(file)
    folder = _THEIRS.replace(".", "/") + "/"
    file.name = file.name.removeprefix(folder)
    file.dependency[:] = [name.removeprefix(folder) for name in file.dependency]
    file.package = file.package.replace("ovmsclient", "tensorflow", 1)
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(".ovmsclient.", ".tensorflow.", 1)
    return file


if importlib.util.find_spec("tensorflow") is None:
    sys.meta_path.append(_Finder())

types_pb2 = importlib.import_module("tensorflow.core.framework.types_pb2")
tensor_pb2 = importlib.import_module("tensorflow.core.framework.tensor_pb2")
predict_pb2 = importlib.import_module("tensorflow_serving.apis.predict_pb2")
get_model_metadata_pb2 = importlib.import_module("tensorflow_serving.apis.get_model_metadata_pb2")
get_model_status_pb2 = importlib.import_module("tensorflow_serving.apis.get_model_status_pb2")
prediction_service_pb2_grpc = importlib.import_module("tensorflow_serving.apis.prediction_service_pb2_grpc")
model_service_pb2_grpc = importlib.import_module("tensorflow_serving.apis.model_service_pb2_grpc")
