# CPU image (default):  docker build -t sgla .
# GPU image:            docker build -t sgla:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
#                           --build-arg EXTRAS=[cuda] --build-arg RUNTIME_PACKAGES="gcc libc6-dev" .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/sgla
ENV PATH=/opt/sgla/bin:$PATH XDG_CACHE_HOME=/opt/cache
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch>=2.11,<2.14"
COPY pyproject.toml README.md LICENSE /src/
COPY csrc /src/csrc
COPY sgla /src/sgla
RUN pip install --no-cache-dir "/src${EXTRAS}"
# Kernels for the CPUs the image may meet: the runtime stage has no compiler.
RUN python -m sgla.kernels.build --isa avx2,avx512,avx512_vnni,avx512_bf16,amx

FROM python:${PYTHON}-slim
# Triton compiles its launchers when a GPU is used; the CPU image needs nothing.
ARG RUNTIME_PACKAGES=
RUN if [ -n "$RUNTIME_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $RUNTIME_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 sgla && install -d -o sgla -g sgla /models
COPY --from=build /opt/sgla /opt/sgla
COPY --from=build --chown=sgla:sgla /opt/cache /home/sgla/.cache
ENV PATH=/opt/sgla/bin:$PATH PYTHONUNBUFFERED=1
USER sgla
WORKDIR /home/sgla
VOLUME /models
EXPOSE 30000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health/ready', timeout=4)"]
ENTRYPOINT ["sgla", "serve", "--host", "0.0.0.0", "--download-dir", "/models"]
