"""A client of containerd's snapshot and diff services, written from the published protocol alone, a
running bcow-snapshotter, and the part that clients of other services need."""

import os
import signal

# grpc's handlers of fork, which are on by default, can abort the process. What the tests fork makes
# no calls.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import support

PROGRAM = os.path.join(os.path.dirname(support.BCOW), "bcow-snapshotter")
VIEW, ACTIVE, COMMITTED = 1, 2, 3
CODES = grpc.StatusCode
RpcError = grpc.RpcError

# Each message: name and number of each field, and its type; "*" is a list, "@" is a map of strings.
MESSAGES = {
    "Create": {"key": (2, "string"), "parent": (3, "string"), "labels": (4, "@")},
    "Mount": {"type": (1, "string"), "source": (2, "string"), "target": (3, "string"),
              "options": (4, "*string")},
    "Mounts": {"mounts": (1, "*Mount")},
    "Key": {"key": (2, "string")},
    "Commit": {"name": (2, "string"), "key": (3, "string"), "labels": (4, "@"),
               "parent": (5, "string")},
    "Time": {"seconds": (1, "int64"), "nanos": (2, "int32")},
    "Info": {"name": (1, "string"), "parent": (2, "string"), "kind": (3, "int32"),
             "created_at": (4, "Time"), "updated_at": (5, "Time"), "labels": (6, "@")},
    "OneInfo": {"info": (1, "Info")},
    "Mask": {"paths": (1, "*string")},
    "Update": {"info": (2, "Info"), "update_mask": (3, "Mask")},
    "List": {"filters": (2, "*string")},
    "Infos": {"info": (1, "*Info")},
    "Usage": {"size": (1, "int64"), "inodes": (2, "int64")},
    "Empty": {},
    "Descriptor": {"media_type": (1, "string"), "digest": (2, "string"), "size": (3, "int64")},
    "Apply": {"diff": (1, "Descriptor"), "mounts": (2, "*Mount")},
    "Applied": {"applied": (1, "Descriptor")},
}
METHODS = {"Prepare": ("Create", "Mounts"), "View": ("Create", "Mounts"),
           "Mounts": ("Key", "Mounts"), "Commit": ("Commit", "Empty"), "Remove": ("Key", "Empty"),
           "Stat": ("Key", "OneInfo"), "Update": ("Update", "OneInfo"), "List": ("List", "Infos"),
           "Usage": ("Key", "Usage"), "Cleanup": ("Empty", "Empty"), "Apply": ("Apply", "Applied")}


def message_classes(messages):
    Field = descriptor_pb2.FieldDescriptorProto
    scalars = {"string": Field.TYPE_STRING, "bytes": Field.TYPE_BYTES, "int64": Field.TYPE_INT64,
               "int32": Field.TYPE_INT32}
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            added = message.field.add(name=field, number=number)
            repeated = kind[0] in "*@"
            added.label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind == "@":
                entry = f"{field.capitalize()}Entry"
                pair = message.nested_type.add(name=entry)
                pair.options.map_entry = True
                for n, part in enumerate(("key", "value"), 1):
                    pair.field.add(name=part, number=n, type=Field.TYPE_STRING,
                                   label=Field.LABEL_OPTIONAL)
                kind = f"{name}.{entry}"
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type, added.type_name = Field.TYPE_MESSAGE, f".t.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    factory = message_factory.MessageFactory(pool)
    return {name: factory.GetPrototype(pool.FindMessageTypeByName(f"t.{name}"))
            for name in messages}


class Client:
    """Calls the service at a socket; each method takes the fields of its request."""

    CLASSES = message_classes(MESSAGES)

    def __init__(self, socket):
        self.channel = grpc.insecure_channel(f"unix:{socket}")

    def __getattr__(self, method):
        request, answer = (self.CLASSES[name] for name in METHODS[method])
        service = "diff.v1.Diff" if method == "Apply" else "snapshots.v1.Snapshots"
        path = f"/containerd.services.{service}/{method}"
        kind = self.channel.unary_stream if method == "List" else self.channel.unary_unary
        call = kind(path, request_serializer=request.SerializeToString,
                    response_deserializer=answer.FromString)

        def invoke(**fields):
            answered = call(request(**fields), timeout=120)
            if method == "List":
                return [info for part in answered for info in part.info]
            return answered
        return invoke

    def close(self):
        self.channel.close()


class Snapshotter(support.Daemon):
    """A running bcow-snapshotter with a client."""

    def __init__(self, root, socket, *options):
        self.root, self.socket, self.options = root, socket, options
        self.log, self.client = root + ".log", None
        self.start()

    def start(self):
        self.launch(PROGRAM, "--root", self.root, "--socket", self.socket, *self.options)
        self.client = Client(self.socket)

    def end(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        # A server that was asked to end waits for its connections.
        self.client.close()
        return self.process.wait(timeout=60)
