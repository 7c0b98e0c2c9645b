//! Turns `include/triton.h` into `bindings.rs`.
//!
//! bindgen translates the header. The functions that it declares would be undefined symbols of the
//! library that uses this crate. So we remove these declarations. A function that the server exports
//! becomes a field of the table `Api` and a name in `SYMBOLS`. A function that a backend exports
//! becomes a type in `entry_point`. We do not use bindgen's own table (`dynamic_library_name`),
//! because its methods panic if a symbol is missing.

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, panic};

use quote::quote;
use syn::{File, ForeignItem, ForeignItemFn, Item, LitCStr, parse_quote};

const HEADER: &str = "include/triton.h";

/// The functions that a backend exports.
const ENTRY_POINTS: [&str; 9] = [
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_Finalize",
    "TRITONBACKEND_GetBackendAttribute",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceReady",
    "TRITONBACKEND_ModelInstanceExecute",
];

/// Enumerations whose values are bits of a `uint32_t`. They become plain constants.
const FLAGS: &str = "TRITONSERVER_(RequestFlag|RequestReleaseFlag|ResponseCompleteFlag)";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={HEADER}");
    for variable in ["CC", "LIBCLANG_PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }

    let mut file = syn::parse_file(&translate_header()).expect("bindgen writes Rust");
    let (exported, called): (Vec<_>, Vec<_>) = take_functions(&mut file).into_iter().partition(is_entry_point);
    file.items.extend(table(&called));
    file.items.push(symbols(&called));
    file.items.push(entry_points(&exported));

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::write(out.join("bindings.rs"), prettyplease::unparse(&file)).expect("OUT_DIR is writable");
}

fn translate_header() -> String {
    let mut builder = bindgen::builder()
        .header(HEADER)
        .allowlist_item("TRITON.*")
        .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: true })
        .constified_enum(FLAGS)
        .prepend_enum_name(false)
        .formatter(bindgen::Formatter::None);
    // libclang may come without stddef.h. If it has its own, that one is used.
    if let Some(folder) = compiler_headers() {
        builder = builder.clang_arg(format!("-idirafter{}", folder.display()));
    }
    match panic::catch_unwind(AssertUnwindSafe(|| builder.generate())) {
        Ok(Ok(bindings)) => bindings.to_string(),
        Ok(Err(error)) => panic!("bindgen could not translate {HEADER}: {error}"),
        Err(_) => panic!(
            "bindgen could not run, most likely because it found no libclang: set LIBCLANG_PATH to \
             the folder that has libclang.so. Any libclang works: the distribution's (libclang-dev), or \
             the Python package's (pip install libclang; the folder is site-packages/clang/native)"
        ),
    }
}

/// The folder of the C compiler's own headers, such as `stddef.h`.
fn compiler_headers() -> Option<PathBuf> {
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let output = Command::new(compiler).arg("-print-file-name=include").output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    // A compiler that does not know the folder prints the word "include".
    Some(Path::new(folder.trim())).filter(|path| path.is_absolute()).map(Path::to_owned)
}

/// Removes the `extern "C"` blocks and returns the functions that were in them.
fn take_functions(file: &mut File) -> Vec<ForeignItemFn> {
    let blocks = file.items.extract_if(.., |item| matches!(item, Item::ForeignMod(_)));
    let items = blocks.flat_map(|block| match block {
        Item::ForeignMod(block) => block.items,
        _ => Vec::new(),
    });
    let functions = items.filter_map(|item| match item {
        ForeignItem::Fn(function) => Some(function),
        _ => None,
    });
    functions.collect()
}

fn is_entry_point(function: &ForeignItemFn) -> bool {
    ENTRY_POINTS.iter().any(|name| function.sig.ident == name)
}

/// Generates the table `Api`, with a field for each function.
fn table(functions: &[ForeignItemFn]) -> [Item; 2] {
    let names: Vec<_> = functions.iter().map(|function| &function.sig.ident).collect();
    let c_names = names.iter().map(|name| c_string(&name.to_string()));
    let docs = functions.iter().map(doc);
    let pointers = functions.iter().map(pointer);
    [
        parse_quote! {
            /// Triton's functions. Those that the server does not have are `None`. Call them with
            /// [`call!`](crate::call).
            #[derive(Clone, Copy)]
            pub struct Api {
                #( #docs pub #names: Option<#pointers>, )*
            }
        },
        parse_quote! {
            impl Api {
                /// A table in which every function is missing.
                pub const EMPTY: Self = Self { #( #names: None, )* };

                /// Looks up all functions.
                ///
                /// # Safety
                ///
                /// The library's symbols of these names must be Triton's functions, and the library
                /// must stay loaded while the table is used.
                pub(crate) unsafe fn from_library(library: &crate::Library) -> Self {
                    // SAFETY: the caller guarantees that the symbols are Triton's functions; the types are the
                    // header's.
                    unsafe { Self { #( #names: crate::find(library, #c_names), )* } }
                }
            }
        },
    ]
}

fn symbols(functions: &[ForeignItemFn]) -> Item {
    let names = functions.iter().map(|function| function.sig.ident.to_string());
    parse_quote! {
        /// The names of the functions in [`Api`], in the header's order.
        pub const SYMBOLS: &[&str] = &[ #( #names, )* ];
    }
}

fn entry_points(functions: &[ForeignItemFn]) -> Item {
    let names = functions.iter().map(|function| &function.sig.ident);
    let docs = functions.iter().map(doc);
    let pointers = functions.iter().map(pointer);
    parse_quote! {
        /// The types of the functions that a backend exports. `const _:
        /// entry_point::TRITONBACKEND_Initialize = TRITONBACKEND_Initialize;` beside an export lets
        /// the compiler check its signature.
        pub mod entry_point {
            use super::*;
            #( #docs pub type #names = #pointers; )*
        }
    }
}

fn pointer(function: &ForeignItemFn) -> syn::Type {
    let (arguments, result) = (&function.sig.inputs, &function.sig.output);
    parse_quote! { unsafe extern "C" fn(#arguments) #result }
}

fn doc(function: &ForeignItemFn) -> impl quote::ToTokens + use<> {
    let docs = function.attrs.iter().filter(|attribute| attribute.path().is_ident("doc"));
    quote! { #(#docs)* }
}

fn c_string(text: &str) -> LitCStr {
    syn::parse_str(&format!("c\"{text}\"")).expect("a C identifier needs no escape")
}
