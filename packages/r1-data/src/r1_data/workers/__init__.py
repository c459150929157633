"""Worker processes that decode untrusted media."""

from r1_data.workers.pool import Ended as Ended
from r1_data.workers.pool import WorkerDied as WorkerDied
from r1_data.workers.pool import Workers as Workers
from r1_data.workers.pool import compute_alone as compute_alone
from r1_data.workers.pool import start_early as start_early
