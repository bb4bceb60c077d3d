# SPDX-License-Identifier: Apache-2.0
"""What Triton's interpreter has none of: functions of libdevice.

V2's rejection sampler draws by `log1p`. Only processes that call `install` have it.
"""


def install() -> None:
    """Gives it to the kernels of this process."""
    from triton.language.extra import libdevice

    libdevice.log1p = log1p


def log1p(x):
    """log(1 + x) of a kernel's tensor."""
    from triton import language as tl

    one_more = x + 1.0
    # Where the sum is rounded, the quotient makes up for it.
    return tl.where(one_more == 1.0, x, tl.log(one_more) * (x / (one_more - 1.0)))
