"""The ordering token: the one tensor that every op mutates, so that no compiler pass reorders or drops any.

There is one for each process and device, shared by all groups: with a token for each group the compiler is
free to move one group's ops past another's (docs/ordering.md shows it happening). Kernels only add to it and
never read an address or a meaning from it.
"""

import threading

import torch


def new_token(device: torch.device) -> torch.Tensor:
    """An int32 tensor of one element, at a static address for CUDA graphs.

    It is a normal tensor even when made inside ``torch.inference_mode``, because it outlives that.
    """
    # Imported here: it costs about a second, which importing torch_gpusync should not.
    from torch._dynamo import mark_static_address

    with torch.inference_mode(False), torch.no_grad():
        token = torch.zeros(1, dtype=torch.int32, device=device)
    mark_static_address(token, guard=False)
    return token


_lock = threading.Lock()
_tokens: dict[torch.device, torch.Tensor] = {}


def process_token(device: torch.device) -> torch.Tensor:
    """The process's token on ``device``, made with the first group there."""
    with _lock:  # two threads that make their first groups at once must get the same
        if device not in _tokens:
            _tokens[device] = new_token(device)
        return _tokens[device]
