# r1 with vLLM for NVIDIA GPUs. CUDA's libraries come with torch's wheels; the driver is the host's.
#
#   docker build -t r1 .
#   docker run --gpus all --shm-size 32g -v "$PWD/runs:/runs" -v "$PWD/models:/models:ro" r1 \
#       train examples/gsm8k/config.yaml worker.actor.model.model_path=/models/NAME trainer.save_checkpoint_path=/runs/first
#
# --shm-size: ranks share a step's pictures in /dev/shm (README.md, "More than one device").
FROM python:3.12-slim-bookworm

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    PATH=/opt/r1/.venv/bin:$PATH

# Triton compiles its kernels where they run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ git libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir "uv==0.13.*" \
    && useradd --create-home --uid 1000 r1 \
    && install --directory --owner r1 /opt/r1 /runs

USER 1000
WORKDIR /opt/r1
COPY --chown=r1 pyproject.toml README.md LICENSE ./
COPY --chown=r1 packages packages
RUN uv sync --all-packages --extra vllm --no-dev --python /usr/local/bin/python3
COPY --chown=r1 examples examples

ENTRYPOINT ["r1"]
CMD ["--help"]
