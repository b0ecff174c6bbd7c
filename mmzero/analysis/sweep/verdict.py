"""What a config came to."""

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED = 'passed', 'failed'
FAILS_PLAINLY, FAILS_UNDER_DDP, TOO_LARGE = 'fails plainly', 'fails under DDP', 'too large'
STATUSES = (PASSED, FAILED, FAILS_UNDER_DDP, FAILS_PLAINLY, TOO_LARGE)


@dataclass
class Verdict:
    """What a config came to under one stage.

    Args:
        config (str): Its name.
        stage (int): The ZeRO stage.
        status (str): 'passed'; 'failed' under the pair; 'fails plainly', in one process without wrappers; 'fails under
            DDP' where a rank has no object, after the rest passed; 'too large' for the memory limit.
        reason (str): Of any status but 'passed'. Defaults to ''.
        trace (str): The traceback, where there is one. Defaults to ''.
        parameters (int): Their number. Defaults to 0.
        units (int): The number of units. Defaults to 0.
        size (int): Side of the images in pixels. Defaults to 0.
        seconds (float): That the trainings of this verdict took; references that another stage needed first are
            counted there. Defaults to 0.
        equal (dict): Distances from the plain model, by quantity.
        different (dict): Distances from DDP where one rank has no object, by quantity.
        own (dict): Distances from DDP where ranks have their own objects; measured where DDP fails without.
        rounded (dict): Distances of the references from themselves with gradients rounded otherwise, where one of the
            above is beyond the project's bound; by part, then by quantity.
    """

    config: str
    stage: int
    status: str = PASSED
    reason: str = ''
    trace: str = ''
    parameters: int = 0
    units: int = 0
    size: int = 0
    seconds: float = 0.0
    equal: dict[str, float] = field(default_factory=dict)
    different: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, dict[str, float]] = field(default_factory=dict)

    def fail(self, status: str, reason: str, trace: str = '') -> None:
        """Enter that it did not pass.

        Args:
            status (str): Any but 'passed'.
            reason (str): Why.
            trace (str): The traceback. Defaults to ''.
        """
        self.status, self.reason, self.trace = status, reason, trace

    def as_dict(self) -> dict[str, Any]:
        """For JSON.

        Returns:
            dict[str, Any]: The fields.
        """
        return asdict(self)
