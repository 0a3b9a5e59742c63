"""The options of the loader: decoding, the order of images, and the division of a batch among processes."""

from ssvit.options import OptionError

FULL, SCALED = DECODINGS = "full", "scaled"  # how much of a JPEG is decoded
PERMUTATION, BIJECTION = ORDERS = "permutation", "bijection"  # how the order of an epoch is made


def check_shares(*, batch_size: int, accumulate: int, processes: int) -> None:
    """OptionError if so many processes cannot share a batch evenly."""
    if batch_size % (processes * accumulate):
        right = f"must be divisible by processes * accumulate = {processes} * {accumulate}"
        fewer = [count for count in range(1, processes) if batch_size % (count * accumulate) == 0]
        hint = f"; {fewer[-1]} of these processes can share it" if fewer else ""
        raise OptionError("batch_size", batch_size, right + hint)
