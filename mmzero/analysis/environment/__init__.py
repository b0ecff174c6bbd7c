"""What a machine and its packages have, and what of mmzero works there.

This package imports nothing but Python's own library before it is asked, and nothing of mmzero, whose top needs torch
and MMEngine: their lack is what it has to tell. `tools/env_report.py` loads it by itself.
"""

from .judging import Facts, Part
from .probing import probe_all
from .verdicts import judge
from .written import as_dict, as_text

__all__ = ['Facts', 'Part', 'as_dict', 'as_text', 'judge', 'probe_all']
