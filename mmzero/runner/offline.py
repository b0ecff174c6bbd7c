"""Building models without the network."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

VARIABLES = dict(HF_HUB_OFFLINE='1', TRANSFORMERS_OFFLINE='1')
"""What tells the Hugging Face libraries not to try, again and again."""


@contextmanager
def no_network() -> Iterator[None]:
    """Let every connection and every look-up of a name fail at once.

    Constructors of some models download: a text encoder, weights of a teacher.

    Yields:
        None: Inside, sockets of this machine alone (``AF_UNIX``) connect.
    """
    connect = socket.socket.connect

    def connect_locally(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            _refuse(address)
        connect(self, address)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, VARIABLES))
        # It reads its variable when it is imported, which MMEngine has done by now.
        constants = sys.modules.get('huggingface_hub.constants')
        if constants is not None:
            stack.enter_context(mock.patch.object(constants, 'HF_HUB_OFFLINE', True))
        stack.enter_context(mock.patch.object(socket.socket, 'connect', connect_locally))
        stack.enter_context(mock.patch.object(socket, 'getaddrinfo', _refuse))
        yield


def _refuse(address: Any, *rest: Any, **options: Any) -> NoReturn:
    raise ConnectionError(f'it needs the network ({address}), and nothing is downloaded here')
