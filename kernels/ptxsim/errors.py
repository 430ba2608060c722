"""The three ways in which PTX can fail here; each message is one line."""


class PTXError(ValueError):
    """The text is not PTX that this parser can read. Names the line of the PTX."""


class UnsupportedPTX(NotImplementedError):
    """Valid PTX that the machine does not model. Names the line and the instruction."""


class KernelFault(RuntimeError):
    """The kernel did something wrong while it ran.

    The message tells what, in which kernel, block and thread, and at which line of the
    source (with `-lineinfo`) and of the PTX.
    """
