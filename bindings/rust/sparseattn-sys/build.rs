// SPDX-License-Identifier: MIT
//! Finds or builds the library that the features ask for. Uses no other crate, so that it works without a registry.
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SPARSEATTN_DIR");
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    let has = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    if env::var_os("DOCS_RS").is_some() || has("LOAD") {
        return; // nothing is linked
    }
    if has("SYSTEM") {
        link_system();
    } else if has("VENDORED") {
        link_vendored();
    } else {
        panic!("sparseattn-sys: choose one of the features vendored, system and load");
    }
}

/// An installed shared library: SPARSEATTN_DIR, pkg-config, the Python package, in this order.
fn link_system() {
    let prefix = env::var_os("SPARSEATTN_DIR").map(PathBuf::from);
    if prefix.is_none() {
        if let Some(flags) = output("pkg-config", &["--libs", "sparseattn"]) {
            return link_flags(&flags);
        }
    }
    let prefix = prefix.or_else(|| output("python3", &["-m", "sparseattn", "prefix"]).map(PathBuf::from));
    let Some(prefix) = prefix else {
        panic!(
            "sparseattn-sys: no installed libsparseattn. Tried SPARSEATTN_DIR (not set), `pkg-config sparseattn`, and \
             `python3 -m sparseattn prefix`. Install it, set SPARSEATTN_DIR to its prefix, or use the feature vendored"
        );
    };
    link_prefix(&prefix);
}

fn link_prefix(prefix: &Path) {
    let folders = ["lib", "lib64", ""].map(|folder| prefix.join(folder));
    let Some(folder) =
        folders.iter().find(|f| f.join("libsparseattn.so").exists() || f.join("libsparseattn.a").exists())
    else {
        panic!(
            "sparseattn-sys: SPARSEATTN_DIR or the Python package names {}, but neither it nor its lib or lib64 has \
                libsparseattn.so or libsparseattn.a",
            prefix.display()
        );
    };
    println!("cargo:rustc-link-search=native={}", folder.display());
    if folder.join("libsparseattn.so").exists() {
        println!("cargo:rustc-link-lib=dylib=sparseattn");
    } else {
        link_static();
    }
    println!("cargo:include={}", prefix.join("include").display());
}

fn link_flags(flags: &str) {
    // pkg-config puts a backslash before a space that is part of a path.
    for flag in flags.replace("\\ ", "\0").split_whitespace() {
        let flag = flag.replace('\0', " ");
        if let Some(folder) = flag.strip_prefix("-L") {
            println!("cargo:rustc-link-search=native={folder}");
        } else if let Some(library) = flag.strip_prefix("-l") {
            println!("cargo:rustc-link-lib={library}");
        }
    }
}

/// The C++ of this package, for CPUs, as a static library: a program then needs nothing at run time.
fn link_vendored() {
    println!("cargo:rerun-if-changed=native/src");
    println!("cargo:rerun-if-changed=native/include");
    println!("cargo:rerun-if-changed=native/CMakeLists.txt");
    let root = Path::new(&env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("native");
    // In a checkout, native/ holds links: where the sources really lie, a compiler's cache knows them.
    let root = root.join("CMakeLists.txt").canonicalize().expect("sparseattn-sys: native/CMakeLists.txt is missing");
    let root = root.parent().unwrap();
    let build = PathBuf::from(env::var_os("OUT_DIR").unwrap()).join("build");
    let jobs = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(root).arg("-B").arg(&build).args([
        "-DCMAKE_BUILD_TYPE=Release",
        "-DSPATTN_STATIC=ON",
        "-DSPATTN_CUDA=OFF",
        "-DSPATTN_TESTS=OFF",
        "-DSPATTN_BENCH=OFF",
    ]);
    run(&mut configure);
    run(Command::new("cmake").arg("--build").arg(&build).args(["--target", "sparseattn_static", "--parallel", &jobs]));
    println!("cargo:rustc-link-search=native={}", build.display());
    link_static();
    println!("cargo:include={}", root.join("include").display());
}

fn link_static() {
    println!("cargo:rustc-link-lib=static=sparseattn");
    println!("cargo:rustc-link-lib=dylib=stdc++");
    println!("cargo:rustc-link-lib=dylib=m");
    println!("cargo:rustc-link-lib=dylib=pthread");
}

/// What a command prints, if there is such a command and it succeeds.
fn output(command: &str, arguments: &[&str]) -> Option<String> {
    let done = Command::new(command).args(arguments).output().ok()?;
    let text = String::from_utf8(done.stdout).ok()?.trim().to_string();
    (done.status.success() && !text.is_empty()).then_some(text)
}

fn run(command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("sparseattn-sys: {command:?} ended with {status}"),
        Err(error) => panic!(
            "sparseattn-sys: {command:?} could not start: {error}. The feature vendored needs cmake 3.25 and a C++20 \
             compiler; the features system and load do not"
        ),
    }
}
