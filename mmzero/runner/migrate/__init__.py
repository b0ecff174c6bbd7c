"""Configs for MMEngine's other ways of sharding, into mmzero's form."""

from mmzero.runner.migrate.file import config_text, write_config
from mmzero.runner.migrate.migration import ENGINES, Migration, check_migrated, migrate_config

__all__ = ['ENGINES', 'Migration', 'check_migrated', 'config_text', 'migrate_config', 'write_config']
