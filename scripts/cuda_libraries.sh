#!/bin/sh
# Points the loader at the CUDA libraries that a Python environment has installed. In the shell that runs qeffect:
#
#     eval "$(scripts/cuda_libraries.sh)"
#
# Prints assignments, and nothing else, to standard output. The environment is the one that PYTHON (default: python3) belongs
# to. Its wheels are nvidia-cuda-nvrtc, nvidia-cublas and, for several GPUs, nvidia-nccl-cu13. Wheels of NCCL have
# libnccl.so.2 alone, but libnccl.so is what is looked for: a link of that name is made in a folder of the user's cache.
set -eu

python=${PYTHON:-python3}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
links=${XDG_CACHE_HOME:-$HOME/.cache}/qeffect/libraries
folders=

# The first folder below the wheels that has a file of this name.
folder_of() {
    for file in "$site"/nvidia/*/lib/"$1"; do
        if [ -e "$file" ]; then
            dirname "$file"
            return
        fi
    done
}

for name in libnvrtc.so.13 libcublasLt.so.13 libnccl.so.2; do
    folder=$(folder_of "$name")
    if [ -z "$folder" ]; then
        echo "cuda_libraries.sh: no $name below $site/nvidia" >&2
        continue
    fi
    case ":$folders:" in
    *":$folder:"*) ;;
    *) folders=$folders${folders:+:}$folder ;;
    esac
    if [ "$name" = libnccl.so.2 ]; then
        mkdir -p "$links"
        ln -sf "$folder/$name" "$links/libnccl.so"
        folders=$folders:$links
    fi
done

if [ -n "$folders" ]; then
    echo "export LD_LIBRARY_PATH='$folders'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
fi
