# CPU image, for x86-64 and ARM:  docker build -t sgla .
# GPU image:                      docker build -t sgla:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
#                                     --build-arg FLASHINFER=flashinfer-python==0.6.13 --build-arg RUNTIME_PACKAGES="gcc libc6-dev" .
ARG PYTHON=3.12.12

FROM python:${PYTHON}-slim-bookworm AS build
# Debian keeps no old versions, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/sgla
ENV PATH=/opt/sgla/bin:$PATH PIP_NO_CACHE_DIR=1
# What seldom changes comes first: torch, then the other dependencies, then the source.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.11.0
RUN pip install --index-url "$TORCH_INDEX" "torch==$TORCH"
ARG FLASHINFER=
COPY configs/image-requirements.txt /src/configs/
RUN pip install -r /src/configs/image-requirements.txt $FLASHINFER
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY csrc /src/csrc
COPY sgla /src/sgla
# Kernels for every CPU that the image may meet: the runtime stage has no compiler.
RUN case "$(uname -m)" in \
        x86_64) levels=generic,avx2,avx512,avx512_vnni,avx512_bf16,amx ;; \
        aarch64) levels=generic,dotprod,i8mm ;; \
        *) levels=generic ;; \
    esac && SGLA_WHEEL_KERNELS=$levels pip install --no-deps /src

FROM python:${PYTHON}-slim-bookworm
# Triton compiles its launchers when a GPU is used; the CPU image needs nothing.
ARG RUNTIME_PACKAGES=
# hadolint ignore=DL3008
RUN if [ -n "$RUNTIME_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $RUNTIME_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
RUN useradd --create-home --uid 10001 sgla && install -d -o sgla -g sgla /models /state
COPY --from=build /opt/sgla /opt/sgla
ENV PATH=/opt/sgla/bin:$PATH PYTHONUNBUFFERED=1 SGLA_HOST=0.0.0.0 SGLA_DOWNLOAD_DIR=/models
# A number, so that Kubernetes sees that it is not root.
USER 10001
WORKDIR /home/sgla
VOLUME /models
EXPOSE 30000
# The command asks the server where its flags and variables put it: another port, TLS.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s CMD ["sgla", "health"]
ENTRYPOINT ["sgla"]
CMD ["serve"]
