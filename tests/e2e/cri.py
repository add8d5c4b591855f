"""A client of containerd's CRI services (images and pods), written from the published protocol: the
fields that the tests use."""

import snapshots

# As in snapshots.MESSAGES.
MESSAGES = {
    "Empty": {},
    "Spec": {"image": (1, "string")},
    "Auth": {"username": (1, "string"), "password": (2, "string")},
    "Pull": {"image": (1, "Spec"), "auth": (2, "Auth")},
    "Pulled": {"image_ref": (1, "string")},
    "RemoveImage": {"image": (1, "Spec")},
    "Name": {"name": (1, "string"), "uid": (2, "string"), "namespace": (3, "string")},
    # 2 is the namespace of the node, so that a pod needs no network of its own.
    "Namespaces": {"network": (1, "int32"), "pid": (2, "int32"), "ipc": (3, "int32"),
                   "userns_options": (5, "UserNamespace")},
    # 0 is a namespace of the pod.
    "UserNamespace": {"mode": (1, "int32"), "uids": (2, "*Ids"), "gids": (3, "*Ids")},
    "Ids": {"host_id": (1, "int64"), "container_id": (2, "int64"), "length": (3, "int64")},
    "PodSecurity": {"namespace_options": (1, "Namespaces")},
    "PodLinux": {"cgroup_parent": (1, "string"), "security_context": (2, "PodSecurity")},
    "Pod": {"metadata": (1, "Name"), "hostname": (2, "string"), "log_directory": (3, "string"),
            "linux": (8, "PodLinux")},
    "RunPod": {"config": (1, "Pod")},
    "PodId": {"pod_sandbox_id": (1, "string")},
    "ContainerName": {"name": (1, "string")},
    "ContainerSecurity": {"namespace_options": (3, "Namespaces")},
    "ContainerLinux": {"security_context": (2, "ContainerSecurity")},
    "Container": {"metadata": (1, "ContainerName"), "image": (2, "Spec"),
                  "command": (3, "*string"), "log_path": (10, "string"),
                  "linux": (15, "ContainerLinux")},
    "Create": {"pod_sandbox_id": (1, "string"), "config": (2, "Container"),
               "sandbox_config": (3, "Pod")},
    "ContainerId": {"container_id": (1, "string")},
    "Stop": {"container_id": (1, "string"), "timeout": (2, "int64")},
    "Exec": {"container_id": (1, "string"), "cmd": (2, "*string"), "timeout": (3, "int64")},
    "Executed": {"stdout": (1, "bytes"), "stderr": (2, "bytes"), "exit_code": (3, "int32")},
}
METHODS = {
    "PullImage": ("Image", "Pull", "Pulled"), "RemoveImage": ("Image", "RemoveImage", "Empty"),
    "RunPodSandbox": ("Runtime", "RunPod", "PodId"),
    "StopPodSandbox": ("Runtime", "PodId", "Empty"),
    "RemovePodSandbox": ("Runtime", "PodId", "Empty"),
    "CreateContainer": ("Runtime", "Create", "ContainerId"),
    "StartContainer": ("Runtime", "ContainerId", "Empty"),
    "StopContainer": ("Runtime", "Stop", "Empty"),
    "RemoveContainer": ("Runtime", "ContainerId", "Empty"),
    "ExecSync": ("Runtime", "Exec", "Executed"),
}


class Client:
    """Calls the services at a socket; each method takes the fields of its request."""

    CLASSES = snapshots.message_classes(MESSAGES)

    def __init__(self, socket):
        self.channel = snapshots.grpc.insecure_channel(f"unix:{socket}")

    def __getattr__(self, method):
        service, *names = METHODS[method]
        request, answer = (self.CLASSES[name] for name in names)
        call = self.channel.unary_unary(f"/runtime.v1.{service}Service/{method}",
                                        request_serializer=request.SerializeToString,
                                        response_deserializer=answer.FromString)
        return lambda **fields: call(request(**fields), timeout=120)

    def close(self):
        self.channel.close()
