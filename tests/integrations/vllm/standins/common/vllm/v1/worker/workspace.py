import torch


class WorkspaceManager:
    def __init__(self) -> None:
        self.requests: list[tuple] = []

    def get_simultaneous(self, *shapes_and_dtypes):
        self.requests.append(shapes_and_dtypes)
        result = []
        for shape, dtype in shapes_and_dtypes:
            storage = torch.empty(shape[0] + 256, dtype=dtype)  # uint8, aligned by hand
            start = -storage.data_ptr() % 256
            result.append(storage[start : start + shape[0]])
        return result


manager = WorkspaceManager()


def current_workspace_manager() -> WorkspaceManager:
    return manager
