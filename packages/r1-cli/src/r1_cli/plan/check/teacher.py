"""Check what a run distils from: tokenizers of folders, and servers."""

from collections.abc import Iterator
from pathlib import Path

from r1_cli.config import ConfigError
from r1_cli.config.distillation import TEACHER
from r1_cli.plan.announce import describe_distillation
from r1_cli.plan.check.findings import Finding, Subject


def check_teacher(subject: Subject) -> Iterator[Finding]:
    teacher = subject.config.worker.teacher
    if subject.tunes or not teacher.used:
        return
    from r1_cli.build.rewards.frozen_model import require_same_tokens
    from r1_cli.build.teacher import open_servers
    from r1_cli.build.teacher_model import open_teacher
    from r1_cli.models.load import ModelError

    yield Finding("model.teacher", "note", describe_distillation(subject.config))
    topk = subject.config.algorithm.distillation.topk or 0
    for key, one in teacher.every.items():
        path = one.loaded
        if path and not Path(path).is_dir():
            yield Finding("model.teacher", "note", f"{key}: {path} is a name of the hub: its files were not looked at")
            continue
        try:
            if one.urls:
                open_servers(one, key, subject.model, topk)
            elif path and path == teacher.in_learner:
                open_teacher(teacher, subject.model)
            elif path:
                vision = subject.model.vision_language
                require_same_tokens(path, key, subject.model, vision_language=vision, trust_remote_code=False)
        except (ConfigError, ModelError) as error:
            yield Finding("model.teacher", "error", str(error), f"correct {TEACHER}, or start its servers")
