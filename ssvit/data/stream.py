"""Batches made and copied on a stream of their own, while a GPU works on the ones before.

The host does not wait for a GPU in training, so it asks for a batch while earlier steps are still computed. What makes
the batch (copies, crops of images in memory) then runs beside them, and what of it the host waits for holds up no step.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch

from ssvit.data.batch import Batch


def streamed(batches: Iterator[Batch], device: torch.device, waited: Callable[[float], object]) -> Iterator[Batch]:
    """The same batches, in order. waited: told the seconds for which the device had nothing to do but to wait for one.

    The host's clock would tell too much: it may wait for data while the device has steps to compute.
    """
    main, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(main)
    waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
    while True:
        asked, given = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        main.record_event(asked)
        with torch.cuda.stream(own):
            batch = next(batches, None)
        if batch is None:
            return
        main.wait_stream(own)
        main.record_event(given)
        for tensor in batch.tensors:
            tensor.record_stream(main)  # or its memory would be used again before the step is over
        waits.append((asked, given))
        while waits and waits[0][1].query():
            first, last = waits.popleft()
            waited(first.elapsed_time(last) / 1000)
        yield batch
