# docker build -t zckpt . && docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" zckpt to-bf16 checkpoint-500 weights/
# The engine is compiled in the first stage; the second has the wheel, no compiler and no root.
FROM python:3.13-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --wheel-dir /wheels /source

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index --find-links /wheels zckpt \
  && useradd --create-home --uid 1000 zckpt
USER 1000
WORKDIR /work
ENTRYPOINT ["zckpt"]
CMD ["--help"]
