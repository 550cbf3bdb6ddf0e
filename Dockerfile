# The machine that tests litft has no container runtime, so CI does not build this.
# docker build -t litft .
# docker run --rm -it --gpus all -v "$PWD:/work" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" litft \
#     finetune lora --checkpoint_dir Qwen/Qwen3-1.7B --data.path examples.jsonl
# A server in it needs --host 0.0.0.0, and -p 127.0.0.1:8000:8000.
FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04
# torch.compile needs a C compiler and the headers of Python
RUN apt-get update && apt-get install -y --no-install-recommends gcc python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md LICENSE /src/
COPY litft /src/litft
RUN pip install "/src[data,serve,gguf,tensorboard]"
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["litft"]
