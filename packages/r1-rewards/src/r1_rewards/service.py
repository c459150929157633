"""The old place of what services share."""

from r1_rewards.spec import check_settings as check_settings
from r1_rewards.types import OpenVerifier

Service = OpenVerifier
