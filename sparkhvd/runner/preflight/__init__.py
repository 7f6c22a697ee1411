"""Preflight: everything that can be known to fail before anything long starts, on the driver and among the ranks.

Checks are pure functions on facts. A check of the ranks returns a message, or "" when all is well, so that every rank comes
to the same answer from the same facts.

Each module imports only those above it:

    conf           Spark configuration of stages of ranks
    databricks     kinds of Databricks' compute
    address_space  address space that torch needs
    facts          facts of a rank, and their comparison
    workers        Python of Spark's workers, checked by a small job
    shared_files   store of a run, checked to be shared by the driver and all ranks
"""

from sparkhvd.runner.preflight.address_space import (
    address_space_limit,
    address_space_needed,
    check_worker,
)
from sparkhvd.runner.preflight.conf import CONF_KEYS, check_conf, is_dynamic
from sparkhvd.runner.preflight.databricks import check_databricks
from sparkhvd.runner.preflight.facts import (
    RankFacts,
    check_address_space,
    check_ranks,
    patch_warning,
    rank_facts,
)
from sparkhvd.runner.preflight.shared_files import (
    SharedFiles,
    check_tokens,
    outcome_path,
    token_path,
    write_token,
)
from sparkhvd.runner.preflight.workers import check_workers, enter_worker

__all__ = [
    "CONF_KEYS",
    "RankFacts",
    "SharedFiles",
    "address_space_limit",
    "address_space_needed",
    "check_address_space",
    "check_conf",
    "check_databricks",
    "check_ranks",
    "check_tokens",
    "check_worker",
    "check_workers",
    "enter_worker",
    "is_dynamic",
    "outcome_path",
    "patch_warning",
    "rank_facts",
    "token_path",
    "write_token",
]
